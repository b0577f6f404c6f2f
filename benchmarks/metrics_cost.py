"""What those cost who watch a scheduler: CPU time for each step, of steps of many rows.

python -m benchmarks.metrics_cost
"""

from __future__ import annotations

import sys
import time

import numpy as np

from scheduler_service.core.plan import (
    BlockMoves,
    RowWork,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
    TableWrites,
)
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.metrics.request_watch import RequestWatch
from scheduler_service.observer import Observer
from scheduler_service.request_lives.life_recorder import LifeRecorder
from scheduler_service.request_names import RequestName
from splitserve_metrics.instruments import Instruments
from splitserve_metrics.scheduler_table import SCHEDULER_METRICS

_ADDRESS = "127.0.0.1:1"
_NUM_STEPS = 2000
_NUM_TRIES = 5


def decode_step(num_rows: int) -> tuple[StepPlan, StepOutcome, StepEvents]:
    """A step in which each row gets a token, and nobody comes or goes."""
    rows, ones = np.arange(num_rows), np.ones(num_rows, np.int32)
    nothing = np.empty(0, np.int32)
    work = RowWork(rows, rows, ones, ones, ones, nothing, None)
    writes = TableWrites(nothing, nothing, nothing, nothing)
    plan = StepPlan(2, 1, (), (), writes, BlockMoves(), work)
    outcome = StepOutcome(2, StepStatus.OK, ones, compute_us=20_000)
    return plan, outcome, StepEvents(rows.astype(np.int64), ones)


def us_per_step(watch: Observer, num_rows: int) -> float:
    """CPU time of all that is told of a step; the best of some tries."""
    for key in range(num_rows):
        request = Request.create(f"r{key}", [1], SamplingParams(), arrival=key, seed=key)
        request.client_key = key
        watch.request_submitted(request, RequestName(f"r{key}"), 0)
    plan, outcome, events = decode_step(num_rows)
    tries = []
    for _ in range(_NUM_TRIES):
        before = time.thread_time()
        for _ in range(_NUM_STEPS):
            watch.step_sent(_ADDRESS, plan, 300_000)
            watch.step_answered(_ADDRESS, outcome)
            watch.tokens_delivered(events)
        tries.append((time.thread_time() - before) / _NUM_STEPS * 1e6)
    return min(tries)


def main() -> int:
    """Prints a line for each size."""
    for num_rows in (1, 16, 64, 256, 1024):
        metrics = us_per_step(
            RequestWatch(Instruments(SCHEDULER_METRICS), time.monotonic_ns), num_rows
        )
        lives = us_per_step(LifeRecorder(num_rows, time.monotonic_ns), num_rows)
        sys.stdout.write(
            f"{num_rows:5} rows  metrics {metrics:7.1f} us, lives of requests {lives:5.1f} us"
            " for each step\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
