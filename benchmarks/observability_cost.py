"""What it costs to be seen, at 10,000 tokens a second: all of it together, and nothing, in turns.

A scheduler, four executors of 64 rows that compute nothing and take 25 ms for a step, a gateway
that serves the live page, and a load in a process of its own, of as many requests as there are
rows. Watched: metrics of scheduler and gateway read each second; traces of as many requests as by
default, to a collector; logs as JSON at info, into a file; somebody who looks at ten frames a
second; lives of requests remembered. Unwatched: nothing of that, logs at error. `--parts` watches
in some of these ways only. Each round has both, all processes new, in the other order every second
round.

`throughput`: tokens a second with all that, by those without, at this load. It is what callers
notice here, and no more: the scheduler's core is not full, so what it does beside hardly shows.
`scheduler_cpu`: seconds of its core for each token, the same way. Where that core is what limits,
tokens a second are one by the CPU time of a token, so this is what throughput would lose there, and
the stricter figure. It is counted, but not free of what else a machine does: caches that others
fill make all code slower, and what runs seldom most of all. `gateway_core`: of a core, what serving
the page and metrics costs a gateway that carries none of the tokens; of these there may be several.
Executors are not in it: `benchmarks.step_cost` has what a step costs them. Intervals hold 95 %, by
a bootstrap over the rounds. One JSON object for each round, and one for all.

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
        pair = on, _ = measured[True], measured[False]
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
        )
    emit(
        "observability_cost",
        parts=[part for part in PARTS if part in parts],
        rounds=num_rounds,
        tokens_per_s=round(float(np.median([on.tokens_per_s for on, _ in pairs]))),
        scheduler_cpu=ratio(
            *zip(*[(on.scheduler_us, off.scheduler_us) for on, off in pairs], strict=True)
        ),
        throughput=ratio(
            *zip(*[(on.tokens_per_s, off.tokens_per_s) for on, off in pairs], strict=True)
        ),
        gateway_core=round(
            float(np.median([on.gateway_ratio - off.gateway_ratio for on, off in pairs])), 4
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
