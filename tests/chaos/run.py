"""Histories of faults, one seed after the other: `make chaos MINUTES=30`, or `SEED=n` for one."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.chaos.history import HistoryFailed, chaos
from tests.support.chaos.network import proxy_network
from tests.support.chaos.schedule import Schedule

_NUM_FAULTS = 6
_MAX_SEED = 10**6


async def run(first_seed: int, num_faults: int, ends_at_s: float) -> None:
    """Lives through histories until the time has come, at least through one."""
    with tempfile.TemporaryDirectory() as folder:
        async with proxy_network(3) as network, chaos(network, Path(folder)) as here:
            seed = first_seed
            while seed == first_seed or time.monotonic() < ends_at_s:
                schedule = Schedule.drawn(seed, num_faults)
                _say(str(schedule))
                load = await here.live_through(schedule)
                _say(f"  {load.num_answers} answers as they were, again: {dict(load.refused)}")
                seed += 1
            _say(f"{seed - first_seed} histories, nothing lost or changed")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """The exit code: 1 if a history failed, which is printed."""
    # Tiny tensors, and three executors that share what there is.
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="how long; 0: one history")
    parser.add_argument(
        "--seed", type=int, help="of the first history; one of its own if not given"
    )
    parser.add_argument("--faults", type=int, default=_NUM_FAULTS, help="of each history")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(_MAX_SEED)
    try:
        asyncio.run(run(seed, given.faults, time.monotonic() + 60 * given.minutes))
    except HistoryFailed as failed:
        _say(f"FAILED: {failed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
