"""`python -m tests.simulation SEED`: one history with its log; `--histories N`: many."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.history import run_history


def main() -> int:
    """Ends with 1 if a history has a problem."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of texts is part of a history.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="of the history, or of the first of many")
    parser.add_argument("--histories", type=int, default=1, help="how many (1)")
    arguments = parser.parse_args()
    if arguments.histories == 1:
        history = run_history(arguments.seed, is_verbose=True)
        print(history.report)  # noqa: T201
        return bool(history.problems)
    started_s, bad = time.monotonic(), 0
    for seed in range(arguments.seed, arguments.seed + arguments.histories):
        history = run_history(seed)
        if history.problems:
            bad += 1
            print(f"seed {seed}: {'; '.join(history.problems)[:500]}", flush=True)  # noqa: T201
    lasted_s = time.monotonic() - started_s
    rate = arguments.histories / lasted_s * 60
    print(f"{arguments.histories} histories in {lasted_s:.1f} s, {rate:.0f} a minute: {bad} bad")  # noqa: T201
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
