"""Tests adapters and encoder tokens through the service, with executors that announce them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from executor_service.steps import SAMPLING_FEATURES, ExecutorLimits, Feature, StepInput
from splitserve_client import BeamSearch, SamplingParams, SchedulingParams
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
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
            for tokens in step.cross.encoder_token_ids
            if len(tokens)
        ]
        # Once for each request, whatever its number of sequences.
        assert sorted(encoded) == [3] * 4 + [40] * 2
        await service.wait_idle()
