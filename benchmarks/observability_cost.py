"""What it costs to be seen, at 10,000 tokens a second: all of it together, and nothing, in turns.

A scheduler, four executors of 64 rows that compute nothing and take 25 ms for a step, a gateway that
serves the live page, and a load in a process of its own with as many requests as there are rows.
Watched: metrics of scheduler and gateway read each second; traces of as many requests as by default,
to a collector; logs as JSON at info, into a file; somebody who looks at ten frames a second; lives
of requests remembered. Unwatched: nothing of that, logs at error. `--parts` watches in some of these
ways only. Each round has both, all processes new, in the other order every second round.

`cpu`: seconds of a core of scheduler and gateway for each token of that with, by that without. That
is the cost in throughput where the scheduler's core is what limits: there tokens a second are one by
the CPU time of a token. It is counted, so it is right on a machine that does other things, too. The
gateway carries none of the tokens here, so what looking costs it stands undiluted beside what the
scheduler spends. `throughput`: tokens a second, the same way; at 10,000 a second no core is full
unless the machine is slow or busy, and then it says what all processes cost each other. Executors'
metrics are not in it: `benchmarks.step_cost` has what a step costs these. Intervals hold 95 %, by a
bootstrap over the rounds. One JSON object for each round, and one for all.

python -m benchmarks.observability_cost [--parts metrics,live]
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import numpy as np

from benchmarks.report import emit
from benchmarks.watched_stack import PARTS, Measured, Shape, measure

_NUM_RESAMPLES = 10_000


def ratio(on: Sequence[float], off: Sequence[float]) -> dict[str, float]:
    """The geometric mean of the rounds' ratios, and the interval that holds 95 %."""
    logs = np.log(np.array(on) / np.array(off))
    rng = np.random.default_rng(0)
    drawn = rng.choice(logs, (_NUM_RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    named = {"ratio": logs.mean(), "low": low, "high": high}
    return {name: round(float(np.exp(value)), 4) for name, value in named.items()}


def compare(shape: Shape, parts: frozenset[str], num_rounds: int) -> None:
    """Prints what each round says, and all together."""
    pairs: list[tuple[Measured, Measured]] = []
    for number in range(num_rounds):
        measured: dict[bool, Measured] = {}
        for is_on in (number % 2 == 1, number % 2 == 0):
            measured[is_on] = asyncio.run(measure(shape, parts if is_on else frozenset()))
        on, off = pair = measured[True], measured[False]
        pairs.append(pair)
        emit(
            "observability_cost_round",
            tokens_per_s=[round(each.tokens_per_s) for each in pair],
            scheduler_us=[round(each.scheduler_us, 2) for each in pair],
            gateway_us=[round(each.gateway_us, 2) for each in pair],
            scheduler_ratio=[round(each.scheduler_ratio, 3) for each in pair],
            scrapes=on.num_scrapes,
            frames=on.num_frames,
            spans=on.num_spans,
            cpu=round(on.us_per_token / off.us_per_token, 4),
        )
    emit(
        "observability_cost",
        parts=[part for part in PARTS if part in parts],
        rounds=num_rounds,
        tokens_per_s=round(float(np.median([on.tokens_per_s for on, _ in pairs]))),
        cpu=ratio(*zip(*[(on.us_per_token, off.us_per_token) for on, off in pairs], strict=True)),
        scheduler_cpu=ratio(
            *zip(*[(on.scheduler_us, off.scheduler_us) for on, off in pairs], strict=True)
        ),
        throughput=ratio(
            *zip(*[(on.tokens_per_s, off.tokens_per_s) for on, off in pairs], strict=True)
        ),
    )


def _parts(text: str) -> frozenset[str]:
    parts = frozenset(text.split(","))
    if not parts <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: some of {','.join(PARTS)}")
    return parts


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executors", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="of each executor")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--warm-up", type=float, default=6.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--parts", type=_parts, default=frozenset(PARTS), help="default: all")
    told = parser.parse_args()
    shape = Shape(told.executors, told.rows, told.step_ms / 1e3, told.warm_up, told.seconds)
    compare(shape, told.parts, told.rounds)


if __name__ == "__main__":
    main()
