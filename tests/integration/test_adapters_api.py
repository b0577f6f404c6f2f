"""Tests adapters and encoder tokens through the service, with executors that announce them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from executor_service.steps import SAMPLING_FEATURES, ExecutorLimits, Feature, StepInput
from splitserve_adapters import AdapterFiles, reference_of
from splitserve_client import (
    AdapterUnknown,
    BeamSearch,
    SamplingParams,
    SchedulingParams,
    SplitserveError,
)
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeAdapters, FakeExecutor
from tests.support.fakes.fake_model import VOCAB_SIZE, expected_tokens
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

PROMPT = [4, 8, 15, 16, 23, 42]
PARAMS = SamplingParams(seed=1, max_tokens=25)
WITH_ADAPTERS = SAMPLING_FEATURES | {Feature.ADAPTERS}
WITH_ENCODER = SAMPLING_FEATURES | {Feature.CROSS_ATTENTION}


def adapters_of(step: StepInput) -> set[str]:
    """The adapters that the rows of a step use."""
    return set(step.adapters) - {""}


async def ask(service: FakeService, adapter: str, params: SamplingParams = PARAMS) -> None:
    """Completes the prompt with `adapter` as it must be."""
    scheduling = SchedulingParams(adapter=adapter)
    generation = await service.client.complete(PROMPT, params, scheduling=scheduling)
    assert generation.completions == expected_completions(PROMPT, params, adapter=adapter)


async def ask_all(service: FakeService, watch: StepWatch, adapters: Sequence[str]) -> None:
    """Asks with all `adapters` at once: they wait behind a request that is held."""
    watch.hold()
    first = asyncio.create_task(ask(service, ""))
    await watch.wait_held()
    asking = [asyncio.create_task(ask(service, adapter)) for adapter in adapters]
    await service.wait_for(
        lambda listed: (
            listed.executors[0].num_waiting_requests + listed.executors[0].num_running_requests
            == len(adapters) + 1
        )
    )
    watch.release()
    await asyncio.gather(first, *asking)
    await service.wait_idle()


@pytest.mark.parametrize(
    ("max_loras", "of_executor", "expected"), [(2, 4, 2), (8, 1, 1), (8, 3, 3)]
)
async def test_steps_keep_the_number_of_adapters_allowed(
    max_loras: int, of_executor: int, expected: int
) -> None:
    watch = StepWatch()
    executor = FakeExecutor(
        num_device_blocks=256,
        features=WITH_ADAPTERS,
        limits=ExecutorLimits(max_adapters_per_step=of_executor),
        fault=watch,
    )
    async with fake_service(executor, max_loras=max_loras) as service:
        adapters = [f"adapter-{number % 6}" for number in range(18)]
        await ask_all(service, watch, [*adapters, "", ""])
    assert max(len(adapters_of(step)) for step in watch.steps) == expected
    # Rows without an adapter are computed beside them.
    assert any("" in step.adapters and adapters_of(step) for step in watch.steps)


async def test_all_sequences_have_the_adapter_of_their_request() -> None:
    executor = FakeExecutor(num_device_blocks=256, features=WITH_ADAPTERS)
    async with fake_service(executor) as service:
        await asyncio.gather(
            *(
                ask(service, adapter, params)
                for adapter in ("a", "b")
                for params in (replace(PARAMS, n=3), replace(PARAMS, n=2, best_of=4))
            )
        )
        beams = replace(PARAMS, max_tokens=8, beam_search=BeamSearch(3))
        found = [
            await service.client.complete(PROMPT, beams, scheduling=SchedulingParams(adapter=name))
            for name in ("a", "b", "a")
        ]
        assert found[0].token_ids != found[1].token_ids
        assert found[0].completions == found[2].completions


async def test_decoder_reads_the_encoder_tokens_of_its_request() -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_device_blocks=256, features=WITH_ENCODER, fault=watch)
    async with fake_service(executor) as service:
        encoders = [[5, 6, 7], [5, 6, 8], list(range(40))]
        for n in (1, 3):
            params = replace(PARAMS, n=n, temperature=0.0)
            generations = await asyncio.gather(
                *(
                    service.client.complete(PROMPT, params, encoder_token_ids=encoder)
                    for encoder in encoders
                )
            )
            for encoder, generation in zip(encoders, generations, strict=True):
                truth = expected_tokens(PROMPT, 25, 0, VOCAB_SIZE, encoder=encoder)
                assert [list(c.token_ids) for c in generation.completions] == [truth] * n
        encoded = [
            len(tokens)
            for step in watch.steps
            if step.cross is not None
            for tokens in step.cross.encoder_inputs
            if len(tokens)
        ]
        # Once for each input, whatever the number of requests and sequences.
        assert sorted(encoded) == [3, 3, 40]
        await service.wait_idle()


# -- adapters that executors load ------------------------------------------------------------------


def write_adapter(folder: Path, weights: bytes) -> str:
    """Writes an adapter that fake executors take; returns its name for rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "new").write_bytes(weights)
    (folder / "new").rename(folder / "adapter_model.safetensors")
    with AdapterFiles.open(folder) as files:
        return reference_of(folder.name, files.digest())


async def ask_loaded(service: FakeService, name: str, reference: str) -> None:
    """Completes the prompt with a registered adapter, which changes the tokens by its version."""
    scheduling = SchedulingParams(adapter=name)
    generation = await service.client.complete(PROMPT, PARAMS, scheduling=scheduling)
    assert generation.completions == expected_completions(PROMPT, PARAMS, adapter=reference)


async def test_many_adapters_take_turns_in_few_slots(tmp_path: Path) -> None:
    references = [write_adapter(tmp_path / f"n{number}", b"%d" % number) for number in range(12)]
    executors = [FakeExecutor(adapters=FakeAdapters(2)) for _ in range(2)]
    async with fake_service(*executors, adapters_dir=str(tmp_path)) as service:
        asking = [ask_loaded(service, f"n{n}", references[n]) for n in range(12) for _ in range(3)]
        await asyncio.gather(*asking, ask(service, ""), ask(service, ""))
    assert all(each.adapters is not None for each in executors)
    loads = [name for each in executors if each.adapters for name in each.adapters.loads]
    assert set(loads) == set(references)


async def test_request_keeps_its_version_when_the_files_are_replaced(tmp_path: Path) -> None:
    old = write_adapter(tmp_path / "sql", b"old")
    watch = StepWatch()
    executor = FakeExecutor(adapters=FakeAdapters(2), fault=watch)
    async with fake_service(executor, adapters_dir=str(tmp_path)) as service:
        watch.hold(after=3)
        running = asyncio.create_task(ask_loaded(service, "sql", old))
        await watch.wait_held()
        new = write_adapter(tmp_path / "sql", b"new")
        assert new != old
        later = asyncio.create_task(ask_loaded(service, "sql", new))
        watch.release()
        await asyncio.gather(running, later)
        (listed,) = await service.client.list_adapters()
        assert f"{listed.name}@{listed.digest[:16]}" == new


async def test_new_executor_gets_files_from_the_scheduler_that_are_gone_from_the_disk(
    tmp_path: Path,
) -> None:
    reference = write_adapter(tmp_path / "sql", b"weights")
    watch = StepWatch()
    executor = FakeExecutor(adapters=FakeAdapters(1), fault=watch)
    async with fake_service(executor, adapters_dir=str(tmp_path)) as service:
        watch.hold(after=3)
        running = asyncio.create_task(ask_loaded(service, "sql", reference))
        await watch.wait_held()
        shutil.rmtree(tmp_path / "sql")
        await service.kill(executor, watch)
        await executor.start()
        await running
    assert executor.adapters is not None
    assert executor.adapters.loads == [reference, reference]


async def test_adapter_that_cannot_be_loaded_costs_its_requests_alone(tmp_path: Path) -> None:
    write_adapter(tmp_path / "bad", b"bad weights")
    good = write_adapter(tmp_path / "good", b"weights")
    executor = FakeExecutor(adapters=FakeAdapters(1))
    async with fake_service(executor, adapters_dir=str(tmp_path)) as service:
        others = [asyncio.create_task(ask_loaded(service, "good", good)) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(SplitserveError, match="lora_A has NaN") as failed:
                await service.client.complete(
                    PROMPT, PARAMS, scheduling=SchedulingParams(adapter="bad")
                )
            assert failed.value.reason == "ADAPTER_INVALID"
        await asyncio.gather(*others)
        with pytest.raises(AdapterUnknown, match="no adapter 'none'; registered: bad, good"):
            await service.client.complete(
                PROMPT, PARAMS, scheduling=SchedulingParams(adapter="none")
            )


async def test_operators_are_told_why_an_adapter_cannot_be_loaded(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good", b"weights")
    write_adapter(tmp_path / "bad", b"bad weights")
    adapters = FakeAdapters(1)
    async with fake_service(FakeExecutor(adapters=adapters)) as service:
        await service.client.load_adapter("a", str(tmp_path / "good"))
        assert adapters.loads == [good.replace("good", "a")]
        for name, replace in (("b", False), ("a", True)):
            with pytest.raises(SplitserveError, match="lora_A has NaN") as failed:
                await service.client.load_adapter(name, str(tmp_path / "bad"), replace=replace)
            assert failed.value.reason == "ADAPTER_INVALID"
        assert [each.name for each in await service.client.list_adapters()] == ["a"]
        await ask_loaded(service, "a", good.replace("good", "a"))


async def test_adapter_is_registered_when_no_executor_can_load_it_now(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good", b"weights")
    other = write_adapter(tmp_path / "other", b"other weights")
    watch, adapters = StepWatch(), FakeAdapters(1)
    async with fake_service(FakeExecutor(adapters=adapters, fault=watch)) as service:
        await service.client.load_adapter("good", str(tmp_path / "good"))
        watch.hold(after=3)
        running = asyncio.create_task(ask_loaded(service, "good", good))
        await watch.wait_held()
        await service.client.load_adapter("other", str(tmp_path / "other"))
        assert adapters.loads == [good]
        watch.release()
        await asyncio.gather(running, ask_loaded(service, "other", other))
