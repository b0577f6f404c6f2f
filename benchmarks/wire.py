"""Round trip scheduler -> executor -> scheduler of one step, encode and decode on both sides.

The executor is a process of its own that computes nothing (`benchmarks.null_executor`): `wire` has
only the messages, decoded into columns and encoded again; `executor` has the whole front of the
executor service behind it. `decode`: 256 running rows, delta batches, as in steady state.
`snapshot`: the same rows with more than 128 blocks each, sent whole.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time

import grpc.aio

from benchmarks.report import emit, percentile
from scheduler_service.executors import execute_method
from scheduler_service.scheduler.values import Request, SamplingParams, SchedulerConfig, StepPlan
from scheduler_service.step_codec import decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc import channel_options
from tests.support.core.driver import EngineWithQueue

BLOCK_SIZE = 16
PROMPT_LEN = 127 * BLOCK_SIZE
MAX_BLOCKS = 200
VOCAB_SIZE = 32_000


def running_core(num_rows: int) -> EngineWithQueue:
    """A core with `num_rows` requests waiting."""
    core = EngineWithQueue(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_device_blocks=num_rows * MAX_BLOCKS,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * PROMPT_LEN,
            max_model_len=MAX_BLOCKS * BLOCK_SIZE,
            max_num_waiting=num_rows,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
        )
    )
    params = SamplingParams(temperature=0.0)
    for index in range(num_rows):
        core.add(Request.create(str(index), [5] * PROMPT_LEN, params, arrival=index, seed=index))
    return core


class Link:
    """One Execute stream and what identifies its batches."""

    def __init__(self, call: grpc.aio.StreamStreamCall, epoch: int) -> None:
        self._call = call
        self._epoch = epoch

    async def round_trip(self, core: EngineWithQueue, plan: StepPlan) -> float:
        """Encodes, sends, receives, decodes; microseconds. The core learns the outcome."""
        start = time.perf_counter()
        batch = encode_plan(plan, scheduler_epoch=1, executor_epoch=self._epoch)
        await self._call.write(batch)
        result = await self._call.read()
        outcome = decode_result(result, len(plan.work.row_ids))
        elapsed_us = (time.perf_counter() - start) * 1e6
        assert result.status == pb.STEP_STATUS_OK, result.error
        core.apply(outcome)
        return elapsed_us


async def measure(mode: str, address: str, num_rows: int, num_steps: int) -> None:
    """Runs both cases and prints them."""
    async with grpc.aio.insecure_channel(address, channel_options()) as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        info = (await stub.GetInfo(pb.GetInfoRequest())).executor
        link = Link(execute_method(channel)(), info.executor_epoch)
        core = running_core(num_rows)
        decode: list[float] = []
        snapshot: list[float] = []
        for index in range(num_steps):
            # As after NEED_SNAPSHOT: all rows are sent whole, their inputs literal.
            is_snapshot = index % 10 == 9
            core._needs_snapshot |= is_snapshot
            plan = core.schedule()
            assert plan is not None
            (snapshot if is_snapshot else decode).append(await link.round_trip(core, plan))
    for case, times in (("decode", decode[20:]), ("snapshot", snapshot[2:])):
        median_us, p99_us = percentile(times, 50), percentile(times, 99)
        emit(f"{mode}_{case}", rows=num_rows, median_us=median_us, p99_us=p99_us)


def main() -> None:
    """Starts the executor process and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=900)
    arguments = parser.parse_args()
    for mode in ("wire", "executor"):
        command = [sys.executable, "-m", "benchmarks.null_executor", mode, str(arguments.rows)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as executor:
            assert executor.stdout is not None
            address = executor.stdout.readline().strip()
            try:
                asyncio.run(measure(mode, address, arguments.rows, arguments.steps))
            finally:
                executor.terminate()


if __name__ == "__main__":
    main()
