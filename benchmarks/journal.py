"""What a journal costs: per step of running decodes, per request, and per checkpoint.

A step is what the scheduler does for one: schedule, encode the batch, decode the result, apply it;
tokens are made up, so no executor and no wire is in it. The same core runs with a journal and
without, in turns of TURN steps, so that what else the machine does hits both. The least of a turn's
medians is what the step costs, and the difference of two what the journal does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from scheduler_service.journal.core import Core, step_codec
from scheduler_service.journal.journaled_core import JournaledCore

from benchmarks.report import emit, percentile
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.journal.checkpoint import load_core
from scheduler_service.journal.journal import FileJournal, Journal, NoJournal
from splitserve.executor.v1 import executor_pb2 as pb

BLOCK_SIZE = 16
PROMPT_LEN = 512
VOCAB_SIZE = 32_000
NUM_WARM_UP_STEPS = 50
TURN = 100
MAX_BYTES = 256 * 2**20


class Bench:
    """A core with `num_rows` running requests."""

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
        self.core: Core = journal.core(config, 0, "127.0.0.1:50052", 1)
        self.add_us: list[float] = []
        self._codec = step_codec(self.core, 1, 1)
        self._tokens = np.random.default_rng(0)
        self._now_ns = 0
        for index in range(num_rows):
            self._add(index)
        for _ in range(NUM_WARM_UP_STEPS):
            self.step()

    def step(self) -> float:
        """One step; its microseconds."""
        core, codec = self.core, self._codec
        self._now_ns += 1_000_000
        start = time.perf_counter()
        core.tick(self._now_ns)
        plan = core.schedule()
        assert plan is not None
        batch = codec.encode(plan)
        core.take_ended()
        scheduled = time.perf_counter()
        num_rows = len(plan.work.row_ids)
        column = self._tokens.integers(0, VOCAB_SIZE, num_rows, np.int32)
        result = pb.StepResult(step_id=batch.step_id, status=pb.STEP_STATUS_OK)
        result.sampled_token_ids = column.tobytes()
        resumed = time.perf_counter()
        core.apply(codec.decode(result, num_rows))
        core.take_ended()
        return (scheduled - start + time.perf_counter() - resumed) * 1e6

    def _add(self, index: int) -> None:
        prompt = self._tokens.integers(0, VOCAB_SIZE, PROMPT_LEN, np.int32)
        params = SamplingParams(temperature=0.0)
        request = Request.create(f"r{index}", prompt.tolist(), params, arrival=index, seed=index)
        request.client_key = index
        start = time.perf_counter()
        self.core.add(request)
        self.add_us.append((time.perf_counter() - start) * 1e6)


def measure(folder: Path, num_rows: int, num_steps: int) -> None:
    """Runs both and prints the costs."""
    journal = FileJournal(folder / f"{num_rows}.journal", MAX_BYTES, scheduler_epoch=1)
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
    emit("journal_checkpoint", rows=num_rows, **checkpoint(recorded.core))
    journal.close()


def checkpoint(core: Core) -> dict[str, float]:
    """What it takes to begin a segment with `core`, and to read it back."""
    assert isinstance(core, JournaledCore)
    dump_s, load_s = [], []
    state = b""
    for _ in range(5):
        start = time.perf_counter()
        state = core.checkpoint().core_checkpoint.scheduler
        dumped = time.perf_counter()
        load_core(state)
        dump_s.append(dumped - start)
        load_s.append(time.perf_counter() - dumped)
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
