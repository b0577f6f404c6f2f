"""What a journal costs: per step of running decodes, per request, and per checkpoint.

A step is what the scheduler does for one: decode the result, handle it, encode the next batch;
tokens are made up, so no executor and no wire is in it. The same scheduler runs with a journal and
without, in turns of TURN steps, so that what else the machine does hits both. The least of a turn's
medians is what the step costs, and the difference of two what the journal does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import emit, percentile
from scheduler_service.journal import FileJournal, Journal, NoJournal, load_state
from scheduler_service.scheduler import Scheduler, SendStep, events
from scheduler_service.scheduler.values import (
    FleetConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    StepPlan,
)
from scheduler_service.step_codec import ReceivedResult, decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.scheduler.v1 import journal_pb2

ADDRESS = "127.0.0.1:50052"
BLOCK_SIZE = 16
PROMPT_LEN = 512
VOCAB_SIZE = 32_000
NUM_WARM_UP_STEPS = 50
TURN = 100
MAX_BYTES = 256 * 2**20


class Bench:
    """A scheduler with one executor, which runs `num_rows` requests."""

    def __init__(self, journal: Journal, num_rows: int, num_steps: int) -> None:
        max_len = PROMPT_LEN + num_steps + NUM_WARM_UP_STEPS + BLOCK_SIZE
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_device_blocks=num_rows * (-(-max_len // BLOCK_SIZE) + 1),
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * PROMPT_LEN,
            max_model_len=32_768,
            max_num_waiting=num_rows,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
        )
        self.add_us: list[float] = []
        self._journal = journal
        fleet = FleetConfig(max_num_waiting=num_rows)
        self._scheduler = Scheduler(fleet)
        journal.begin(self._scheduler, fleet)
        self._tokens = np.random.default_rng(0)
        self._now_ns = 0
        self._plan: StepPlan | None = None
        self._handle(events.ExecutorJoined(ADDRESS, 1, config, num_credits=1))
        self._handle(events.ExecutorConnected(ADDRESS))
        for index in range(num_rows):
            self._add(index)
        self._handle(events.Tick())
        for _ in range(NUM_WARM_UP_STEPS):
            self.step()

    def step(self) -> float:
        """One step; its microseconds."""
        plan = self._plan
        assert plan is not None
        num_rows = len(plan.work.row_ids)
        column = self._tokens.integers(0, VOCAB_SIZE, num_rows, np.int32)
        result = pb.StepResult(step_id=plan.step_id, status=pb.STEP_STATUS_OK)
        result.sampled_token_ids = column.tobytes()
        start = time.perf_counter()
        outcome = decode_result(result, num_rows)
        self._handle(events.StepCompleted(ADDRESS, outcome), ReceivedResult(result, num_rows))
        return (time.perf_counter() - start) * 1e6

    def _handle(self, event: events.Event, received: ReceivedResult | None = None) -> None:
        """As the driver does."""
        self._now_ns += 1_000_000
        record = self._journal.record(event, self._now_ns, received)
        found = self._scheduler.handle(event, self._now_ns)
        batches = []
        for effect in found:
            if isinstance(effect, SendStep):
                self._plan = effect.plan
                batches.append(encode_plan(effect.plan, scheduler_epoch=1, executor_epoch=1))
        record.done(found, batches)

    def _add(self, index: int) -> None:
        prompt = self._tokens.integers(0, VOCAB_SIZE, PROMPT_LEN, np.int32)
        params = SamplingParams(temperature=0.0)
        request = Request.create(f"r{index}", prompt.tolist(), params, arrival=index, seed=index)
        request.client_key = index
        start = time.perf_counter()
        self._handle(events.RequestSubmitted(request))
        self.add_us.append((time.perf_counter() - start) * 1e6)


def measure(folder: Path, num_rows: int, num_steps: int) -> None:
    """Runs both and prints the costs."""
    journal = FileJournal(folder / f"{num_rows}.journal", MAX_BYTES)
    plain = Bench(NoJournal(), num_rows, num_steps)
    recorded = Bench(journal, num_rows, num_steps)
    medians: dict[str, list[float]] = {"plain": [], "recorded": []}
    worst_us = 0.0
    num_bytes = journal.num_bytes
    for _ in range(num_steps // TURN):
        for name, bench in (("plain", plain), ("recorded", recorded)):
            times = [bench.step() for _ in range(TURN)]
            medians[name].append(percentile(times, 50))
            worst_us = max(worst_us, *times) if bench is recorded else worst_us
    num_bytes = journal.num_bytes - num_bytes
    plain_us, recorded_us = (min(values) for values in medians.values())
    emit(
        "journal_step",
        rows=num_rows,
        plain_us=plain_us,
        recorded_us=recorded_us,
        cost_us=round(recorded_us - plain_us, 1),
        cost_ratio=round(recorded_us / plain_us - 1, 3),
        worst_recorded_us=round(worst_us, 1),
        bytes_per_step=num_bytes // (num_steps // TURN * TURN),
    )
    plain_us, recorded_us = (percentile(bench.add_us, 50) for bench in (plain, recorded))
    emit("journal_add", prompt_len=PROMPT_LEN, plain_us=plain_us, recorded_us=recorded_us)
    emit("journal_checkpoint", rows=num_rows, **checkpoint(journal))
    journal.close()


def checkpoint(recorded: FileJournal) -> dict[str, float]:
    """What it takes to begin a segment, and to read the scheduler back."""
    dump_s, load_s = [], []
    state = b""
    for _ in range(5):
        start = time.perf_counter()
        entry = recorded.checkpoint()
        dump_s.append(time.perf_counter() - start)
        state = journal_pb2.JournalEntry.FromString(entry).scheduler_checkpoint.scheduler
        start = time.perf_counter()
        load_state(state, Scheduler)
        load_s.append(time.perf_counter() - start)
    times = {"dump_ms": min(dump_s), "load_ms": min(load_s)}
    return {name: round(value * 1e3, 1) for name, value in times.items()} | {"bytes": len(state)}


def main() -> None:
    """Measures at several sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in arguments.rows:
            measure(Path(folder), num_rows, arguments.steps)


if __name__ == "__main__":
    main()
