"""Executors die by SIGKILL while tokens are guessed for: what comes is what comes without guesses.

They hold the streams in their middle until one is dead: nobody has to be in time. How much is
guessed is for the services to say, by what steps take here; with prompt lookup it was some 400
tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, FinishReason, SamplingParams
from splitserve_options.option import BUNDLED_MODEL
from tests.chaos.test_process_loss import GatedProcesses, Stream
from tests.support.processes.gate import GATE, GATED_SCHEDULER, Gate
from tests.support.processes.patience import PATIENT

# A machine with much other work takes its time. Without kernels scores depend a little on who
# shares a step, and so might tokens.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("native_library")]

NUM_TOKENS = 96
# Nobody gets to the end by a step that begins here.
HELD_AT = 60
PROMPTS = ([5, 6, 7, 8] * 6, [21, 22, 23] * 8, [9] * 20)
# Who knows few words repeats itself.
FEW = tuple(range(300, 304))
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=FEW
)
SAMPLED = replace(GREEDY, temperature=0.5, seed=17)
TELLING = replace(SAMPLED, allowed_token_ids=None)
EXACT = ("--dtype", "float32", "--deterministic")


@dataclass(frozen=True, slots=True)
class Way:
    """How tokens are guessed: options of both services."""

    scheduler: tuple[str, ...]
    executor: tuple[str, ...]


NOT_AT_ALL = Way(("--max-run-ahead", "1"), ())
# Nobody runs on: a step that costs much beside its passes, as those of a small model, mostly does.
LOOKUP = Way(("--speculation", "prompt-lookup", "--max-run-ahead", "1"), ())
DRAFT_MODEL = Way((), ("--draft-model", "bundled"))


class Guessing(GatedProcesses):
    """A scheduler and executors that guess in one way."""

    def __init__(self, way: Way) -> None:
        super().__init__(Path(BUNDLED_MODEL))
        self._way = way
        self.start_scheduler("--reconnect-timeout-s", "0.2", *GATED_SCHEDULER, *way.scheduler)

    def start_executor(self, *options: str, address: str = "") -> str:
        """See Processes."""
        return super().start_executor(*EXACT, *self._way.executor, *options, address=address)


def start_streams(client: AsyncClient, tasks: asyncio.TaskGroup) -> list[Stream]:
    wanted = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED, TELLING)]
    streams = [Stream() for _ in wanted]
    for stream, (prompt, params) in zip(streams, wanted, strict=True):
        tasks.create_task(stream.run(client, list(prompt), params))
    return streams


async def undisturbed() -> list[list[int]]:
    """What comes where nobody guesses, and nobody dies."""
    running = Guessing(NOT_AT_ALL)
    try:
        await running.run_executors(1)
        async with AsyncClient(running.address, PATIENT) as client, asyncio.TaskGroup() as tasks:
            streams = start_streams(client, tasks)
        return [stream.tokens for stream in streams]
    finally:
        running.kill_all()


@pytest.mark.parametrize("way", [LOOKUP, DRAFT_MODEL])
async def test_streams_are_those_without_guesses_when_an_executor_is_killed(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = await undisturbed()
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(GATE, str(gate.path))
    running = Guessing(way)
    try:
        await running.run_executors(2)
        gate.hold(0)
        async with AsyncClient(running.address, PATIENT) as client:
            async with asyncio.TaskGroup() as tasks:
                streams = start_streams(client, tasks)
                await running.wait_known(len(streams))
                gate.hold(HELD_AT)
                # Who is guessed for is held long before others have got so far.
                starts = [tasks.create_task(stream.started.wait()) for stream in streams]
                await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
                executors = await running.wait_until(lambda executors: len(executors) == 2)
                busiest = max(executors, key=lambda executor: executor.num_running_requests)
                assert busiest.num_running_requests > 0
                running.kill_executor(busiest.address)
                gate.release()
            assert [stream.tokens for stream in streams] == truth
            finishes = [stream.finish for stream in streams]
            assert {finish and finish.reason for finish in finishes} == {FinishReason.LENGTH}
    finally:
        running.kill_all()
