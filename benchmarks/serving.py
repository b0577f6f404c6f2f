"""What serving costs: tokens/s through both processes against the model runner alone.

All requests are submitted at once, so the batches follow from the requests: the same core decides
them again in this process, and the same runner executes them with nothing in between. `loss_ratio`
is the share of tokens/s that scheduler, wire and process boundary cost. Both are run in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from benchmarks.report import emit
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import LoadedEngine, load_engine
from executor_service.service import decode_batch
from executor_service.steps import PendingStep, StepExecutor, StepInput, execute_step
from scheduler_service.scheduler.values import Request, SchedulerConfig, StepOutcome, StepStatus
from scheduler_service.scheduler.values import SamplingParams as CoreParams
from scheduler_service.step_codec import encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_client import AsyncClient, Finish, SamplingParams, SchedulingParams, SplitserveError
from splitserve_common import with_fewer_threads
from splitserve_options import options
from tests.support.core.driver import EngineWithQueue

Prompts = list[list[int]]
START_TIMEOUT_S = 600.0


@contextmanager
def serving(
    model: str, threads: int, *executor_options: str, scheduler_options: Sequence[str] = ()
) -> Iterator[str]:
    """A scheduler and an executor process; yields the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = [sys.executable, "-m"]
    quiet = ["--log-level", "error"]
    commands = (
        [
            *(*common, "scheduler_service", "--listen", address, "--cluster-listen", address),
            *(*quiet, *scheduler_options),
        ],
        [
            *(*common, "executor_service", "--model", model, "--threads", str(threads)),
            *("--scheduler", address, *quiet, *executor_options),
        ],
    )
    processes = [
        subprocess.Popen(command, env=with_fewer_threads(os.environ)) for command in commands
    ]
    try:
        yield address
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def wait_until_connected(address: str) -> None:
    """Waits until the executor is there."""
    async with asyncio.timeout(START_TIMEOUT_S), AsyncClient(address) as client:
        while True:
            with suppress(SplitserveError):
                executors = (await client.list_executors()).executors
                if executors and executors[0].is_connected:
                    return
            await asyncio.sleep(0.1)


async def served(address: str, prompts: Prompts, num_tokens: int) -> tuple[float, int]:
    """Tokens per second through the services, and the number of steps."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    # Each run is to compute what the runner alone computes.
    scheduling = SchedulingParams(bypass_prefix_cache=True)
    async with AsyncClient(address) as client, client.session() as session:
        steps_before = (await client.list_executors()).executors[0].num_steps
        start = time.perf_counter()
        num_output_tokens = 0
        requests = [session.submit(prompt, params, scheduling=scheduling) for prompt in prompts]
        for request in requests:
            async for event in request:
                if isinstance(event, Finish):
                    num_output_tokens += event.usage.num_output_tokens
        elapsed_s = time.perf_counter() - start
        num_steps = (await client.list_executors()).executors[0].num_steps - steps_before
    return num_output_tokens / elapsed_s, num_steps


class Recorder:
    """Runs steps and remembers them."""

    def __init__(self, engine: LoadedEngine) -> None:
        self._runner = engine.runner
        self.steps: list[StepInput] = []

    def begin(self, step: StepInput) -> PendingStep | None:
        self.steps.append(step)
        return self._runner.begin(step)


def record(engine: LoadedEngine, prompts: Prompts, num_tokens: int) -> list[StepInput]:
    """The steps that the services would execute."""
    info = engine.info
    core = EngineWithQueue(
        SchedulerConfig(
            block_size=info.block_size,
            num_device_blocks=info.num_device_blocks,
            max_num_seqs=info.limits.max_num_rows,
            max_num_batched_tokens=info.limits.max_num_batched_tokens,
            max_model_len=info.model.max_model_len,
            max_num_waiting=len(prompts),
            vocab_size=info.model.vocab_size,
            eos_token_ids=frozenset(),
        )
    )
    params = CoreParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [
        Request.create(str(index), prompt, params, arrival=index, seed=0)
        for index, prompt in enumerate(prompts)
    ]
    recorder = Recorder(engine)
    executor = StepExecutor(info, recorder)
    # The first request to arrive is on its way before the others are in.
    core.add(requests[0])
    while (plan := core.schedule()) is not None:
        if plan.step_id == 1:
            for request in requests[1:]:
                core.add(request)
        batch = encode_plan(plan, scheduler_epoch=1, executor_epoch=info.executor_epoch)
        answer = executor.execute(decode_batch(pb.ScheduleBatch.FromString(batch.data)))
        assert answer.output is not None
        core.apply(StepOutcome(plan.step_id, StepStatus.OK, answer.output.sampled_token_ids))
    return recorder.steps


def alone(engine: LoadedEngine, steps: list[StepInput]) -> float:
    """Seconds the runner needs for `steps`."""
    start = time.perf_counter()
    for step in steps:
        execute_step(engine.runner, step)
    return time.perf_counter() - start


def main() -> None:
    """Compares, for each number of torch threads; with all cores, everybody shares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    for threads in arguments.threads:
        compare(arguments, threads)


def compare(arguments: argparse.Namespace, threads: int) -> None:
    """Runs both in turns and prints the ratio."""
    flags = ["--model", arguments.model, "--threads", str(threads)]
    config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
    engine = load_engine(config, executor_epoch=1)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, engine.info.model.vocab_size) for _ in range(rng.randrange(8, 64))]
        for _ in range(arguments.requests)
    ]
    steps = record(engine, prompts, arguments.tokens)
    num_tokens = arguments.requests * arguments.tokens
    alone_rates, served_rates, served_steps = [], [], 0
    # One loop for all: gRPC's threads tell that in which they began of calls that are over.
    with serving(arguments.model, threads) as address, asyncio.Runner() as runner:
        runner.run(wait_until_connected(address))
        runner.run(served(address, prompts, arguments.tokens))
        for _ in range(arguments.runs):
            alone_rates.append(num_tokens / alone(engine, steps))
            rate, served_steps = runner.run(served(address, prompts, arguments.tokens))
            served_rates.append(rate)
    ratios = [each / alone for each, alone in zip(served_rates, alone_rates, strict=True)]
    emit(
        "serving",
        served_tokens_per_s=round(statistics.median(served_rates), 1),
        alone_tokens_per_s=round(statistics.median(alone_rates), 1),
        loss_ratio=round(1 - statistics.median(ratios), 4),
        step_ms=round(1e3 * num_tokens / statistics.median(alone_rates) / len(steps), 2),
        steps={"served": served_steps, "alone": len(steps)},
        requests=arguments.requests,
        threads=threads,
    )


if __name__ == "__main__":
    main()
