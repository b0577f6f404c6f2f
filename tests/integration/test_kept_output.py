"""Tests output that the scheduler keeps, and requests that go on after it from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from splitserve_client import (
    AsyncClient,
    BeamSearch,
    Completion,
    Finish,
    FinishReason,
    InvalidRequest,
    KeptOutput,
    OutputUnknown,
    SamplingParams,
    SchedulingParams,
    Tokens,
    collect_generation,
)
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 9, 8, 7, 1]
ONE = SamplingParams(seed=11, max_tokens=40)
THREE = replace(ONE, n=3)
# Its sequences end at different times.
UNEVEN = replace(THREE, max_tokens=60, stop_token_ids=(5, 37, 69, 101))


@dataclass(frozen=True, slots=True)
class Running:
    """A service, and a client of its own."""

    service: FakeService
    watch: StepWatch
    client: AsyncClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    watch = StepWatch()
    async with (
        fake_service(FakeExecutor(num_device_blocks=256, fault=watch)) as service,
        AsyncClient(service.scheduler.address) as client,
    ):
        yield Running(service, watch, client)


def keeping(key: str, *, resumes: bool = False, read: tuple[int, ...] = ()) -> SchedulingParams:
    return SchedulingParams(
        kept_output=KeptOutput(key, duration_s=60.0, resumes=resumes, num_read_tokens=read)
    )


async def read_some(
    running: Running, key: str, params: SamplingParams, num_steps: int
) -> dict[int, list[int]]:
    """Reads a request while that many steps run, then closes its stream; the tokens read."""
    outputs: dict[int, list[int]] = {}
    events = running.client.generate(PROMPT, params, scheduling=keeping(key))

    async def read() -> None:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Tokens):
                    outputs.setdefault(event.index, []).extend(event.token_ids)

    reading = asyncio.create_task(read())
    running.watch.hold(after=num_steps)
    await running.watch.wait_held()
    reading.cancel()
    await asyncio.wait({reading})
    running.watch.release()
    await running.service.wait_idle()
    return outputs


async def go_on(
    running: Running, key: str, params: SamplingParams, read: tuple[int, ...] = ()
) -> tuple[list[Tokens | Finish], tuple[Completion, ...]]:
    """Resumes the output kept under `key`; its events, and the completions they make."""
    seen: list[Tokens | Finish] = []

    async def events() -> AsyncIterator[Tokens | Finish]:
        scheduling = keeping(key, resumes=True, read=read)
        async for event in running.client.generate(PROMPT, params, scheduling=scheduling):
            seen.append(event)
            yield event

    generation = await collect_generation(events(), params.num_completions)
    return seen, generation.completions


@pytest.mark.parametrize("params", [ONE, THREE, UNEVEN], ids=["one", "three", "uneven"])
async def test_request_goes_on_after_the_output_of_a_lost_stream(
    running: Running, params: SamplingParams
) -> None:
    outputs = await read_some(running, f"lost {params}"[:128], params, 15)
    read = tuple(len(outputs[index]) for index in range(params.num_completions))
    assert all(read)
    steps_before = len(running.watch.steps)
    events, completions = await go_on(running, f"lost {params}"[:128], params, read)
    assert completions == expected_completions(PROMPT, params)
    first = {event.index: event for event in reversed(events) if isinstance(event, Tokens)}
    for index, tokens in outputs.items():
        assert list(first[index].token_ids[: len(tokens)]) == tokens
    # The tokens are not sampled again: one step computes them, and some may be in vain at an end.
    longest = max(len(completion.token_ids) for completion in completions)
    assert len(running.watch.steps) - steps_before <= longest - min(read) + 8


async def test_ended_request_is_repeated(running: Running) -> None:
    first = await collect_generation(
        running.client.generate(PROMPT, UNEVEN, scheduling=keeping("ended")), 3
    )
    steps_before = len(running.watch.steps)
    _, completions = await go_on(running, "ended", UNEVEN, (1, 1, 1))
    assert completions == first.completions
    assert len(running.watch.steps) == steps_before


async def test_unfinished_request_is_taken_over(running: Running) -> None:
    running.watch.hold(after=10)
    first = asyncio.create_task(
        collect_generation(running.client.generate(PROMPT, ONE, scheduling=keeping("both")))
    )
    await running.watch.wait_held()
    second = asyncio.create_task(go_on(running, "both", ONE))
    generation = await first
    assert generation.completions[0].reason is FinishReason.ABORTED
    running.watch.release()
    events, completions = await second
    assert completions == expected_completions(PROMPT, ONE)
    assert isinstance(events[0], Tokens)
    assert len(events[0].token_ids) >= generation.usage.num_output_tokens


async def test_resumed_request_is_kept_as_well(running: Running) -> None:
    read = len((await read_some(running, "twice", ONE, 8))[0])
    events = running.client.generate(
        PROMPT, ONE, scheduling=keeping("twice", resumes=True, read=(read,))
    )
    async with aclosing(events):
        await anext(events)
        await anext(events)
    _, completions = await go_on(running, "twice", ONE, (read + 1,))
    assert completions == expected_completions(PROMPT, ONE)


@pytest.mark.parametrize(
    ("key", "prompt", "read"),
    [("other", PROMPT, ()), ("known", [*PROMPT, 1], ()), ("known", PROMPT, (41,))],
    ids=["key", "prompt", "more than was kept"],
)
async def test_unknown_output_is_refused(
    running: Running, key: str, prompt: list[int], read: tuple[int, ...]
) -> None:
    await collect_generation(running.client.generate(PROMPT, ONE, scheduling=keeping("known")))
    scheduling = keeping(key, resumes=True, read=read)
    with pytest.raises(OutputUnknown):
        await collect_generation(running.client.generate(prompt, ONE, scheduling=scheduling))


@pytest.mark.parametrize(
    ("kept", "params", "problem"),
    [
        (KeptOutput(""), ONE, "kept_output.key is empty"),
        (KeptOutput("k" * 129), ONE, "kept_output.key has 129 characters"),
        (KeptOutput("k", 0.0), ONE, "kept_output.duration is 0 s; allowed: above 0, at most 600"),
        (KeptOutput("k", 601.0), ONE, "kept_output.duration is 601 s; allowed: above 0"),
        (KeptOutput("k", 1.0), replace(ONE, num_logprobs=1), "combined with num_logprobs"),
        (KeptOutput("k", 1.0), replace(ONE, n=1, best_of=2), "combined with best_of"),
        (
            KeptOutput("k", 1.0),
            SamplingParams(beam_search=BeamSearch(2), max_tokens=4),
            "combined with beam_search",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_unusable_wish_is_refused(
    running: Running, kept: KeptOutput, params: SamplingParams, problem: str
) -> None:
    scheduling = SchedulingParams(kept_output=kept)
    with pytest.raises(InvalidRequest, match=problem):
        await collect_generation(running.client.generate(PROMPT, params, scheduling=scheduling))
