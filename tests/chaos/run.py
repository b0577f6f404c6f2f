"""Histories of faults, one seed after the other: `make chaos MINUTES=30`, or `SEED=n` for one."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.chaos.faults import FAULTS, Schedule
from tests.support.chaos.history import HistoryFailed, chaos
from tests.support.chaos.namespaces import UNSHARE, is_allowed, namespace_network
from tests.support.chaos.network import Network, proxy_network

_NUM_FAULTS = 6
_MAX_SEED = 10**6


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be lived through: at least one history, and more until `ends_at_s`."""

    first_seed: int
    num_faults: int
    ends_at_s: float
    kinds: tuple[str, ...]

    async def run(self, network: Network) -> None:
        """Raises HistoryFailed."""
        with tempfile.TemporaryDirectory() as folder:
            async with chaos(network, Path(folder)) as here:
                seed = self.first_seed
                while seed == self.first_seed or time.monotonic() < self.ends_at_s:
                    schedule = Schedule.drawn(seed, self.num_faults, self.kinds)
                    _say(str(schedule))
                    load = await here.live_through(schedule)
                    _say(f"  {load.num_answers} answers as they were, again: {dict(load.refused)}")
                    seed += 1
                _say(f"{seed - self.first_seed} histories, nothing lost or changed")

    async def run_over(self, network: str) -> None:
        """Over `proxies`, or over `namespaces`. Raises HistoryFailed."""
        if network == "proxies":
            async with proxy_network(3) as proxies:
                await self.run(proxies)
        else:
            with namespace_network(3) as namespaces:
                await self.run(namespaces)


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
    parser.add_argument("--network", choices=("proxies", "namespaces"), default="proxies")
    parser.add_argument("--inside", action="store_true", help="this is a namespace of our own")
    given = parser.parse_args()
    if given.network == "namespaces" and not given.inside:
        if not is_allowed():
            parser.error("--network namespaces: this machine does not allow them, or has no nft")
        command = [*UNSHARE, sys.executable, "-m", "tests.chaos.run", *sys.argv[1:], "--inside"]
        os.execvp(command[0], command)
    seed = given.seed if given.seed is not None else random.randrange(_MAX_SEED)
    # Not every kernel can delay; proxies can.
    kinds = tuple(kind for kind in FAULTS if given.network == "proxies" or kind != "network delays")
    try:
        ends_at_s = time.monotonic() + 60 * given.minutes
        asyncio.run(Plan(seed, given.faults, ends_at_s, kinds).run_over(given.network))
    except HistoryFailed as failed:
        _say(f"FAILED: {failed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
