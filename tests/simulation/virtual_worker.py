"""The thread of a simulated executor: steps in their order, which take virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from executor_service.service import decode_batch, encode_answer, encode_part
from executor_service.steps import ExecutorInfo, StepAnswer, StepExecutor, StepInput, TokenRuns
from splitserve.executor.v1 import executor_pb2 as pb
from tests.simulation.virtual_loop import VirtualLoop
from tests.support.fakes.fake_runner import StepFault
from tests.support.steps.batches import read_i32

# How soon a step notices that its executor is slow, or no longer.
_SLICE_S = 0.25

# Changes a result before it is sent; it is told which seeds had rows in that step.
Spoil = Callable[[pb.StepResult, list[int]], None]
Send = Callable[[Callable[[], pb.StepResult]], None]


@dataclass(frozen=True, slots=True)
class Job:
    """`is_for_one`: it is left out, and takes no time, if more than one batch has no answer."""

    duration_s: float
    run: Callable[[], None]
    is_for_one: bool = False


@dataclass(slots=True)
class Mood:
    """What is wrong with it at present. `slowness`: how many times longer a step takes."""

    slowness: float = 1.0
    fault: Callable[[StepInput], StepFault] = lambda _step: StepFault()
    spoil: Spoil = lambda _result, _seeds: None


@dataclass(frozen=True, slots=True)
class Pace:
    """What a step takes if its mood is good.

    `step_s`, `pass_s` for each token that rows may run on for, `byte_s` for each byte of a batch.
    """

    step_s: float
    pass_s: float
    byte_s: float
    mood: Mood


class VirtualWorker:
    """Stands for `StepWorker`: steps in their order, each of which takes its time."""

    def __init__(self, loop: VirtualLoop, steps: StepExecutor, pace: Pace) -> None:
        self._loop = loop
        self._steps = steps
        self._pace = pace
        self._jobs: deque[Job] = deque()
        self._received_s: deque[float] = deque()
        self._wakeup = asyncio.Event()
        self.seeds: list[int] = []

    def describe(self, info: ExecutorInfo) -> ExecutorInfo:
        """See StepWorker."""
        running_s = self._loop.time() - self._received_s[0] if self._received_s else 0.0
        return replace(
            info,
            newest_scheduler_epoch=self._steps.scheduler_epoch,
            step_running_ms=int(running_s * 1000),
        )

    def submit(
        self, batch: pb.ScheduleBatch, then: Send, report: Send = lambda _encode: None
    ) -> None:
        """See StepWorker. Parts have one token of each row."""
        decoded = decode_batch(batch)
        self._received_s.append(self._loop.time())

        def deliver(result: pb.StepResult) -> None:
            self._received_s.popleft()
            then(lambda: result)

        def answer(answered: StepAnswer) -> None:
            result = encode_answer(answered)
            self._pace.mood.spoil(result, self.seeds)
            if not batch.work.reports_parts or result.status != pb.STEP_STATUS_OK:
                deliver(result)
                return
            encodings = [partial(encode_part, decoded.identity, part) for part in _parts(result)]
            parts = [Job(pace.pass_s, partial(report, encode), True) for encode in encodings]
            self._jobs.extendleft([Job(0.0, partial(deliver, result)), *reversed(parts)])

        def begin() -> None:
            self.seeds = []
            self._steps.begin(decoded, answer)
            self._steps.finish()

        pace, num_run_on = self._pace, read_i32(batch.work.num_run_on_tokens)
        most = 0 if batch.work.reports_parts else max(num_run_on, default=0)
        self._put(pace.step_s + pace.pass_s * most + pace.byte_s * batch.ByteSize(), begin)

    def begin_life(self, executor_epoch: int) -> None:
        """See StepWorker."""
        self._put(0.0, lambda: self._steps.begin_life(executor_epoch))

    def adopt_scheduler_epoch(self, scheduler_epoch: int) -> None:
        """See StepWorker."""
        self._put(0.0, lambda: self._steps.adopt_scheduler_epoch(scheduler_epoch))

    def finish(self) -> None:
        """See StepWorker; what is left takes no time."""
        while self._jobs:
            self._jobs.popleft().run()

    def _put(self, duration_s: float, run: Callable[[], None]) -> None:
        self._jobs.append(Job(duration_s, run))
        self._wakeup.set()

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            while self._jobs:
                job = self._jobs[0]
                if job.is_for_one and len(self._received_s) > 1:
                    self._jobs.popleft()
                    continue
                await self._work(job.duration_s)
                # Unless it was finished meanwhile.
                if self._jobs and self._jobs[0] is job:
                    self._jobs.popleft().run()
            self._wakeup.clear()
            if not self._jobs:
                await self._wakeup.wait()

    async def _work(self, work_s: float) -> None:
        """What takes so long if nothing is wrong; that may change at any time."""
        while work_s > 0:
            slowness = self._pace.mood.slowness
            slice_s = min(work_s * slowness, _SLICE_S)
            await asyncio.sleep(slice_s)
            work_s -= slice_s / slowness + 1e-9


def _parts(result: pb.StepResult) -> list[TokenRuns]:
    """The tokens of a result, the next of each row in each part; the last are in no part."""
    tokens, offsets = read_i32(result.sampled_token_ids), read_i32(result.sampled_offsets)
    rows = [tokens[start:end] for start, end in pairwise(offsets)]
    most = max(map(len, rows), default=0)
    return [TokenRuns.of([row[i : i + 1] for row in rows]) for i in range(most - 1)]
