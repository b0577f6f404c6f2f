"""The scheduler alone where there is much of something: what a single step costs at worst.

`waiting`: steps of 256 decodes while so many requests wait, under each policy; with `lane` all of
them want an adapter that has no slot. `several`: steps of 256 requests with two sequences each,
while 100 requests wait, or none. `growing`: all rows get a block in the same step, with a
sliding window, lookahead slots or neither. `overdue`: so many deadlines have passed. `aborted`: so
many of the waiting requests are aborted at once; the figure is for one. `us` is `schedule()` +
`apply()` of the slowest step of those measured, `median_us` of the others; processor time, so that
other work on the machine does not matter. One JSON object each.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import numpy as np

from benchmarks.report import emit
from scheduler_service.scheduler.queue import QUEUE_POLICIES
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    Feature,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from tests.support.core.driver import EngineWithQueue

BLOCK_SIZE = 16
NUM_DECODES = 256
_NUM_ABORTED = 10_000
_NUM_STEPS = 20
_SECOND_NS = 10**9


class Core:
    """A scheduler core, and an executor that answers at once."""

    def __init__(self, num_rows: int, num_waiting: int, **options: object) -> None:
        values: dict[str, object] = {
            "block_size": BLOCK_SIZE,
            "num_device_blocks": 16 * num_rows,
            "max_num_seqs": num_rows,
            "max_num_batched_tokens": 64 * num_rows,
            "max_model_len": 4096,
            "max_num_waiting": num_rows + num_waiting,
            "vocab_size": 32000,
            "eos_token_ids": frozenset({2}),
            "features": frozenset({Feature.ADAPTERS}),
            "max_adapters": 1,
            "prefix_caching": False,
        }
        self.core = EngineWithQueue(SchedulerConfig(**(values | options)))  # type: ignore[arg-type]
        self._num_requests = 0
        self.core.tick(_SECOND_NS)

    def add(self, num_tokens: int = 32, n: int = 1, **scheduling: object) -> None:
        """Adds a request for `n` answers; `scheduling`: what it asks of the policies."""
        self._num_requests += 1
        number = self._num_requests
        request = Request.create(
            f"r{number}",
            [3 + (number + position) % 1000 for position in range(num_tokens)],
            SamplingParams(temperature=float(n > 1), ignore_eos=True, max_tokens=2000, n=n),
            arrival=number,
            seed=0,
            scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
        )
        self.core.add(request)

    def step(self) -> float:
        """Microseconds of `schedule()` and `apply()`."""
        start = time.thread_time_ns()
        plan = self.core.schedule()
        planned = time.thread_time_ns()
        outcome = None if plan is None else _outcome(plan)
        answered = time.thread_time_ns()
        if outcome is not None:
            self.core.apply(outcome)
        else:
            self.core.take_ended()
        return (planned - start + time.thread_time_ns() - answered) / 1e3

    def fill(self, num_requests: int, n: int = 1) -> None:
        """Lets so many requests run, each for `n` answers."""
        for _ in range(num_requests):
            self.add(n=n, priority=-9, adapter="a")
        while self.core.num_waiting:
            self.step()


def _outcome(plan: StepPlan) -> StepOutcome:
    token_ids = np.full(len(plan.work.row_ids), 7, np.int32)
    if plan.work.samples is not None:
        token_ids[~plan.work.samples] = -1
    return StepOutcome(plan.step_id, StepStatus.OK, token_ids, compute_us=10_000)


def _report(workload: str, core: Core, *, num_steps: int = _NUM_STEPS, **what: object) -> None:
    gc.collect()
    gc.freeze()
    steps = sorted(core.step() for _ in range(num_steps))
    gc.unfreeze()
    figures = {"us": round(steps[-1]), "median_us": round(statistics.median(steps[:-1]))}
    emit("scheduler_extremes", workload=workload, **what, **figures)


def measure_waiting(policy: str, num_waiting: int, *, lane: bool, delay_factor: float) -> None:
    """Steps of decodes while many wait."""
    core = Core(
        NUM_DECODES,
        num_waiting,
        queue_policy=policy,
        delay_factor=delay_factor,
        batch_policy=BatchPolicyName.PREFILL_FIRST if delay_factor else BatchPolicyName.MIXED,
        max_num_seqs=NUM_DECODES + 8 * lane,
    )
    core.fill(NUM_DECODES)
    for number in range(num_waiting):
        core.add(
            priority=number % 3,
            tenant=f"t{number % 100}",
            adapter="b" if lane else "",
            deadline_ns=10**15 + number if number % 2 else None,
        )
    _report(
        "waiting", core, policy=policy, waiting=num_waiting, lane=lane, delay_factor=delay_factor
    )
    if not lane and not delay_factor:
        start = time.thread_time_ns()
        num_aborted = min(_NUM_ABORTED, num_waiting)
        for number in range(num_aborted):
            core.core.abort(f"r{NUM_DECODES + 1 + 7 * number % num_waiting}")
        us = (time.thread_time_ns() - start) / 1e3 / num_aborted
        emit("scheduler_extremes", workload="aborted", policy=policy, us=round(us, 1))


def measure_several(policy: str, num_waiting: int) -> None:
    """Steps of decodes of requests for two answers each, while others wait for rows."""
    core = Core(2 * NUM_DECODES, 2 * num_waiting, queue_policy=policy)
    core.fill(NUM_DECODES, n=2)
    core.step()
    for number in range(num_waiting):
        core.add(priority=number % 3, tenant=f"t{number}", adapter="a")
    _report("several", core, policy=policy, waiting=num_waiting)


def measure_growing(num_rows: int, *, prefix_caching: bool, **options: object) -> None:
    """Steps in one of which all rows get a block."""
    core = Core(num_rows, 0, prefix_caching=prefix_caching, **options)
    core.fill(num_rows)
    _report(
        "growing",
        core,
        num_steps=2 * BLOCK_SIZE,
        rows=num_rows,
        prefix_caching=prefix_caching,
        options=options,
    )


def measure_overdue(num_overdue: int) -> None:
    """Steps after the deadlines of many have passed."""
    core = Core(NUM_DECODES, num_overdue, queue_policy="deadline", max_num_seqs=NUM_DECODES + 1)
    core.fill(NUM_DECODES)
    for number in range(num_overdue):
        core.add(priority=number % 3, deadline_ns=2 * _SECOND_NS + number)
    core.core.tick(4 * _SECOND_NS)
    _report("overdue", core, overdue=num_overdue)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=100_000, help="requests")
    parser.add_argument("--rows", default="1024,4096", help="that grow")
    arguments = parser.parse_args()
    for policy in QUEUE_POLICIES:
        measure_waiting(policy, arguments.waiting, lane=False, delay_factor=0.0)
        measure_waiting(policy, arguments.waiting, lane=True, delay_factor=0.0)
        measure_waiting(policy, arguments.waiting, lane=False, delay_factor=2.0)
        for num_waiting in (0, 100):
            measure_several(policy, num_waiting)
    measure_overdue(arguments.waiting // 10)
    measure_overdue(arguments.waiting)
    for num_rows in map(int, arguments.rows.split(",")):
        for prefix_caching in (True, False):
            measure_growing(num_rows, prefix_caching=prefix_caching)
            measure_growing(num_rows, prefix_caching=prefix_caching, sliding_window=40)
            measure_growing(num_rows, prefix_caching=prefix_caching, num_lookahead_slots=24)


if __name__ == "__main__":
    main()
