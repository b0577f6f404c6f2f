"""Processes die by SIGKILL in the middle of streams; no token is lost, doubled or changed.

Executors hold the streams in their middle until the process is dead: nobody has to be in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from splitserve_client import (
    AsyncClient,
    BeamSearch,
    Finish,
    FinishReason,
    Generation,
    SamplingParams,
    Tokens,
    collect_generation,
)
from tests.support.models.hugging_face import generate_greedily, load_reference
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes import gated_executor
from tests.support.processes.gate import GATE, GATED_SCHEDULER, Gate
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

NUM_TOKENS = 150
KILL_AFTER = 15
# So far streams come until something is dead. Those that begin at once are never so far apart.
HELD_AT = 60
SCHEDULER = ("--reconnect-timeout-s", "0.2", *GATED_SCHEDULER)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.95, seed=17)
SEVERAL = (
    replace(SAMPLED, n=3),
    replace(SAMPLED, n=2, best_of=3),
    replace(GREEDY, n=2, beam_search=BeamSearch(3)),
)
PROMPTS = ([5, 6, 7], [9] * 20, [11, 12], [21, 22, 23, 24, 25])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=2)


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[int]]:
    """What Hugging Face `generate` says, greedily."""
    reference = load_reference(model)
    return [generate_greedily(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]


class GatedProcesses(Processes):
    """Real executors, which go no further than their gate says."""

    executor_module = gated_executor.MODULE


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    gate = Gate(tmp_path_factory.mktemp("gate") / "gate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GATE, str(gate.path))
        yield gate


@pytest.fixture(scope="module")
def running(model: Path, gate: Gate) -> Iterator[Processes]:
    """A scheduler; each test says how many executors it needs, and leaves those that live."""
    running = GatedProcesses(model)
    try:
        running.start_scheduler(*SCHEDULER)
        yield running
    finally:
        running.kill_all()


class Stream:
    """One completion; `started` is set once it is in full swing."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.started = asyncio.Event()

    async def run(self, client: AsyncClient, prompt: list[int], params: SamplingParams) -> None:
        async for event in client.generate(prompt, params):
            if isinstance(event, Tokens):
                self.tokens += event.token_ids
                if len(self.tokens) >= KILL_AFTER:
                    self.started.set()
            else:
                self.finish = event


def start_streams(
    client: AsyncClient, tasks: asyncio.TaskGroup, params: list[SamplingParams]
) -> list[Stream]:
    streams = [Stream() for _ in PROMPTS]
    for stream, prompt, each in zip(streams, PROMPTS, params, strict=True):
        tasks.create_task(stream.run(client, list(prompt), each))
    return streams


async def hold_in_the_middle(
    running: Processes, gate: Gate, num_requests: int, started: list[asyncio.Event]
) -> None:
    """Lets no request begin before all are there, nor any end; waits until all have `started`."""
    await running.wait_known(num_requests)
    gate.hold(HELD_AT)
    for each in started:
        await each.wait()


def assert_equal_to(truth: list[list[int]], streams: list[Stream]) -> None:
    assert [stream.tokens for stream in streams] == truth
    for stream in streams:
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.LENGTH


async def test_client_resumes_with_the_same_randomness_when_the_scheduler_is_killed(
    running: Processes, gate: Gate
) -> None:
    async with AsyncClient(running.address, PATIENT) as client:
        await running.run_executors(1)
        async with asyncio.TaskGroup() as tasks:
            undisturbed = start_streams(client, tasks, [SAMPLED] * len(PROMPTS))
        gate.hold(0)
        async with asyncio.TaskGroup() as tasks:
            streams = start_streams(client, tasks, [SAMPLED] * len(PROMPTS))
            await hold_in_the_middle(running, gate, len(streams), [s.started for s in streams])
            running.kill_scheduler()
            assert not any(stream.finish for stream in streams)
            gate.release()
            running.start_scheduler(*SCHEDULER)
        assert_equal_to([stream.tokens for stream in undisturbed], streams)


async def test_streams_move_to_the_other_executor_when_one_is_killed(
    running: Processes, gate: Gate, truth: list[list[int]]
) -> None:
    async with AsyncClient(running.address, PATIENT) as client:
        await running.run_executors(2)
        gate.hold(0)
        async with asyncio.TaskGroup() as tasks:
            streams = start_streams(client, tasks, [GREEDY] * len(PROMPTS))
            await hold_in_the_middle(running, gate, len(streams), [s.started for s in streams])
            executors = await running.wait_until(lambda executors: len(executors) == 2)
            busiest = max(executors, key=lambda executor: executor.num_running_requests)
            assert busiest.num_running_requests > 0
            running.kill_executor(busiest.address)
            gate.release()
        assert_equal_to(truth, streams)


async def complete_and_note(
    client: AsyncClient, params: SamplingParams, started: asyncio.Event
) -> Generation:
    """What `complete` returns; sets `started` once the stream is in full swing."""

    async def noting_start() -> AsyncIterator[Tokens | Finish]:
        num_tokens = 0
        async for event in client.generate(PROMPTS[1], params):
            num_tokens += len(event.token_ids) if isinstance(event, Tokens) else 0
            if num_tokens >= KILL_AFTER:
                started.set()
            yield event

    return await collect_generation(noting_start(), params.num_completions)


def tokens_of(generations: list[Generation]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in generation.completions] for generation in generations]


async def test_all_pause_until_a_new_executor_comes_when_the_only_one_is_killed(
    running: Processes, gate: Gate, truth: list[list[int]]
) -> None:
    async with AsyncClient(running.address, PATIENT) as client:
        [executor] = await running.run_executors(1)
        undisturbed = await asyncio.gather(
            *(client.complete(PROMPTS[1], params) for params in SEVERAL)
        )
        gate.hold(0)
        started = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            several = [
                tasks.create_task(complete_and_note(client, params, started)) for params in SEVERAL
            ]
            streams = start_streams(client, tasks, [GREEDY] * len(PROMPTS))
            num_requests = len(several) + len(streams)
            all_started = [started, *[stream.started for stream in streams]]
            await hold_in_the_middle(running, gate, num_requests, all_started)
            running.kill_executor(executor.address)
            gate.release()
            assert not any(task.done() for task in several)
            await running.wait_until(lambda executors: not executors)
            running.start_executor()
        assert_equal_to(truth, streams)
        assert tokens_of([task.result() for task in several]) == tokens_of(undisturbed)
