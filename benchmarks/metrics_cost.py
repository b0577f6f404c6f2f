"""CPU time that watchers of a scheduler need for each step, whose rows get a token each.

python -m benchmarks.metrics_cost
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from scheduler_service.audit import NoAudit
from scheduler_service.callers import Admission
from scheduler_service.journal import NoJournal
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler import (
    DeliverTokens,
    Event,
    ExecutorJoined,
    RequestSubmitted,
    Scheduler,
    SendStep,
    StepCompleted,
)
from scheduler_service.scheduler.values import (
    BlockMoves,
    FleetConfig,
    NewRow,
    Request,
    RowWork,
    SamplingParams,
    SchedulerConfig,
    StartedRequest,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
    TableWrites,
)
from scheduler_service.watching import (
    LifeRecorder,
    LiveView,
    OperatorLog,
    RequestWatch,
    Submission,
    Transition,
    Watcher,
)
from splitserve_metrics import SCHEDULER_METRICS, Instruments

ADDRESS = "127.0.0.1:1"
_NUM_STEPS = 1000
_NUM_TRIES = 5
_PLANNING_NS = 300_000
_STEP_NS = 20_000_000
_NOTHING = np.empty(0, np.int32)
_CONFIG = SchedulerConfig(
    block_size=16,
    num_device_blocks=1024,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=512,
    max_num_waiting=8,
    vocab_size=100,
    eos_token_ids=frozenset(),
)


class WatchedSteps:
    """Turns of a scheduler with one executor, whose rows are full.

    `num_changes`: requests that end with each step, and are replaced by others.
    """

    def __init__(self, num_rows: int, num_changes: int = 0) -> None:
        self._num_rows = num_rows
        self._num_changes = num_changes
        self._scheduler = Scheduler(FleetConfig())
        self._scheduler.handle(ExecutorJoined(ADDRESS, 1, _CONFIG, 1), 0)
        self._keys = count(1)
        self._now_ns = 0
        self._step_ids = count(1)
        self._rows: deque[tuple[Request, int]] = deque()

    def begin(self) -> Iterator[Transition]:
        """Yields the turns after which all rows have had their first token."""
        for row_id in range(self._num_rows):
            yield self._submit(row_id)
        yield self._step(list(self._rows))
        yield self._step([])

    def step(self) -> Iterator[Transition]:
        """Yields the turns of one more step."""
        ended = [self._rows.popleft() for _ in range(self._num_changes)]
        for request, row_id in ended:
            request.stop_len = 2
            yield self._submit(row_id)
        new = list(self._rows)[len(self._rows) - len(ended) :]
        yield self._step(new, [request for request, _ in ended])

    def _submit(self, row_id: int) -> Transition:
        key = next(self._keys)
        request = Request.create(f"r{key}", [1], SamplingParams(), arrival=key, seed=key)
        request.client_key = key
        self._rows.append((request, row_id))
        submission = Submission(Admission(RequestName(request.request_id)), self._now_ns)
        return self._turn(RequestSubmitted(request), submission=submission)

    def _step(
        self, new: list[tuple[Request, int]], ended: list[Request] | None = None
    ) -> Transition:
        """The result of a step, and the next step, in which `new` begin and `ended` are not."""
        self._now_ns += _STEP_NS
        step_id = next(self._step_ids)
        rows, ones = np.arange(self._num_rows), np.ones(self._num_rows, np.int32)
        keys = np.array([request.client_key for request, _ in self._rows], np.int64)
        stays = np.array([key for _, key in sorted(self._stays())], np.int64)
        work = RowWork(rows, stays, ones, ones, ones, _NOTHING, None)
        writes = TableWrites(_NOTHING, _NOTHING, _NOTHING, _NOTHING)
        new_rows = [
            NewRow(request.sequence, row_id, _NOTHING, request.sequence.token_ids)
            for request, row_id in new
        ]
        notes = [StartedRequest(request, 1, 0, 0) for request, _ in new]
        moves = BlockMoves()
        plan = StepPlan(step_id, step_id - 1, (), new_rows, writes, moves, work, notes=notes)
        events = StepEvents(keys, ones, finished=ended or [])
        outcome = StepOutcome(step_id - 1, StepStatus.OK, ones, compute_us=20_000)
        return self._turn(
            StepCompleted(ADDRESS, outcome), SendStep(ADDRESS, plan), DeliverTokens(events)
        )

    def _stays(self) -> Iterator[tuple[int, int]]:
        for request, row_id in self._rows:
            yield row_id, request.client_key

    def _turn(
        self,
        event: Event,
        *effects: SendStep | DeliverTokens,
        submission: Submission | None = None,
    ) -> Transition:
        scheduler = self._scheduler
        return Transition.of(event, effects, self._now_ns, scheduler, _PLANNING_NS, submission)


def us_per_step(make: Callable[[], Watcher], num_rows: int, num_changes: int = 0) -> float:
    """CPU time of the turns of a step; the best of some tries."""
    steps, watcher = WatchedSteps(num_rows, num_changes), make()
    for turn in steps.begin():
        watcher.see(turn)
    tries = []
    for _ in range(_NUM_TRIES):
        turns = [turn for _ in range(_NUM_STEPS) for turn in steps.step()]
        before = time.thread_time()
        for turn in turns:
            watcher.see(turn)
        tries.append((time.thread_time() - before) / _NUM_STEPS * 1e6)
    return min(tries)


def _watchers() -> dict[str, Callable[[], Watcher]]:
    return {
        "metrics": lambda: RequestWatch(Instruments(SCHEDULER_METRICS)),
        "lives": lambda: LifeRecorder(1000, time.monotonic_ns),
        "live view": lambda: LiveView(now_ns=lambda: 0),
        "log": lambda: OperatorLog(NoAudit(), NoJournal()),
    }


def main() -> int:
    """Prints a line for each size."""
    for num_rows, num_changes in ((1, 0), (16, 0), (64, 0), (256, 0), (1024, 0), (64, 1), (64, 8)):
        found = [
            f"{name} {us_per_step(make, num_rows, num_changes):6.1f} us"
            for name, make in _watchers().items()
        ]
        sys.stdout.write(f"{num_rows:5} rows, {num_changes} replaced: {', '.join(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
