"""What it costs a scheduler to be seen, at 10,000 tokens a second: with and without, in turns.

A scheduler, four executors of 64 rows that compute nothing and take 25 ms for a step, and one
Session with as many requests as there are rows. Each round has a scheduler with `--on` and one with
`--off`, in the other order every second round; metrics are read every five seconds. `cpu`: seconds
of a core for each token of that with, by that without; `throughput`: tokens a second, the same way.
Where the core of a scheduler is what limits, throughput falls as `cpu` rises. Intervals hold 95 %,
by a bootstrap over the rounds. One JSON object for each round, and one for all.

python -m benchmarks.observability_cost --on="--log-format json" --off="--remember-requests 0"
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from benchmarks.ceiling import Load, cpu_s, process, wait_connected
from benchmarks.report import emit
from tests.support.processes.addresses import reserve_address

_NUM_RESAMPLES = 10_000
_READ_EVERY_S = 5.0
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What runs in every round, and how long it is looked at."""

    num_executors: int
    num_rows: int
    step_s: float
    warm_up_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one scheduler. `us_per_token`: of a core."""

    tokens_per_s: float
    us_per_token: float


async def measure(shape: Shape, options: Sequence[str], metrics: str | None) -> Measured:
    """A scheduler with `options`. `metrics`: where they are read, if they are."""
    address = reserve_address()
    listen = ("--listen", address, "--cluster-listen", address, "--log-level", "info")
    rows = ("--max-num-seqs", str(shape.num_rows))
    tokens = ("--max-num-batched-tokens", str(16 * shape.num_rows))
    read = () if metrics is None else ("--metrics-listen", metrics)
    arguments = (*listen, *rows, *tokens, *read, *options)
    executors = (address, shape.num_executors, shape.num_rows, shape.step_s)
    with (
        process("scheduler_service", *arguments) as scheduler,
        process("benchmarks.many_executors", *map(str, executors)),
    ):
        await wait_connected(address, shape.num_executors)
        load = Load(address, shape.num_executors * shape.num_rows)
        running = asyncio.create_task(load.run())
        reading = asyncio.create_task(_read(metrics))
        await asyncio.sleep(shape.warm_up_s)
        used, loop = psutil.Process(scheduler.pid), asyncio.get_running_loop()
        before_s, num_before, start_s = cpu_s(used), load.num_tokens, loop.time()
        await asyncio.sleep(shape.seconds)
        elapsed_s, num_tokens = loop.time() - start_s, load.num_tokens - num_before
        used_s = cpu_s(used) - before_s
        for task in (running, reading):
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(running, reading, return_exceptions=True)
    return Measured(num_tokens / elapsed_s, 1e6 * used_s / num_tokens)


async def _read(metrics: str | None) -> None:
    """As Prometheus does, but more often."""
    while metrics is not None:
        await asyncio.sleep(_READ_EVERY_S)
        await asyncio.to_thread(_get, f"http://{metrics}/metrics")


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        answer.read()


def ratio(on: Sequence[float], off: Sequence[float]) -> dict[str, float]:
    """The geometric mean of the rounds' ratios, and the interval that holds 95 %."""
    logs = np.log(np.array(on) / np.array(off))
    rng = np.random.default_rng(0)
    drawn = rng.choice(logs, (_NUM_RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    named = {"ratio": logs.mean(), "low": low, "high": high}
    return {name: round(float(np.exp(value)), 4) for name, value in named.items()}


def compare(shape: Shape, on: Sequence[str], off: Sequence[str], num_rounds: int) -> None:
    """Prints what each round says, and all together."""
    pairs: list[tuple[Measured, Measured]] = []
    for number in range(num_rounds):
        measured: dict[bool, Measured] = {}
        for is_on in (number % 2 == 1, number % 2 == 0):
            metrics = reserve_address() if is_on else None
            measured[is_on] = asyncio.run(measure(shape, on if is_on else off, metrics))
        pair = measured[True], measured[False]
        pairs.append(pair)
        emit(
            "observability_cost_round",
            tokens_per_s=[round(each.tokens_per_s) for each in pair],
            us_per_token=[round(each.us_per_token, 2) for each in pair],
        )
    emit(
        "observability_cost",
        on=["--metrics-listen", *on],
        off=list(off),
        rounds=num_rounds,
        tokens_per_s=round(float(np.median([each.tokens_per_s for each, _ in pairs]))),
        cpu=ratio(*zip(*[(a.us_per_token, b.us_per_token) for a, b in pairs], strict=True)),
        throughput=ratio(*zip(*[(a.tokens_per_s, b.tokens_per_s) for a, b in pairs], strict=True)),
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executors", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="of each executor")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--on", default="", help="further options of the scheduler that is seen")
    parser.add_argument("--off", default="", help="options of the other one")
    told = parser.parse_args()
    shape = Shape(told.executors, told.rows, told.step_ms / 1e3, told.warm_up, told.seconds)
    compare(shape, shlex.split(told.on), shlex.split(told.off), told.rounds)


if __name__ == "__main__":
    main()
