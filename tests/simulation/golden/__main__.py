"""`python -m tests.simulation.golden`: compares all frozen fleets with their record.

`--record` records them anew, which is right only where a rule was meant to change, or a fleet.
Ends with 1 if something differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from tests.simulation.golden.fleets import FAMILIES, fleets
from tests.simulation.golden.meaning import compare_one, record_one, write


def main() -> int:
    """Runs all fleets, of those families whose names have a text in common."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of texts is part of a history.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.golden", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.golden", description=__doc__)
    parser.add_argument("text", nargs="?", default="", help="a part of the names of families")
    parser.add_argument("--record", action="store_true", help="record them anew")
    parser.add_argument("--workers", type=int, default=1, help="processes that share them (1)")
    arguments = parser.parse_args()
    families = [family for family in FAMILIES if arguments.text in family]
    started_s, num_differences = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as workers:
        for family in families:
            tasks = [(family, number) for number in range(len(fleets(family)))]
            if arguments.record:
                write(family, workers.map(record_one, tasks, chunksize=1))
                continue
            for found in workers.imap(compare_one, tasks):
                num_differences += len(found)
                _say("\n".join(found))
    verb = "recorded" if arguments.record else f"{num_differences} differences"
    _say(f"{', '.join(families)}: {verb}, {time.monotonic() - started_s:.1f} s")
    return bool(num_differences)


def _say(text: str) -> None:
    if text:
        print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
