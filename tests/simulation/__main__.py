"""`python -m tests.simulation SEED`: one history with its log; `--histories N`: many."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from tests.simulation.history import examine, run_history

_SAY_EVERY = 250
_SHOWN_CHARS = 500


def main() -> int:
    """Ends with 1 if a history has a problem."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of texts is part of a history.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="of the history, or of the first of many")
    parser.add_argument("--histories", type=int, default=1, help="how many (1)")
    parser.add_argument("--workers", type=int, default=1, help="processes that share them (1)")
    arguments = parser.parse_args()
    if arguments.histories == 1:
        history = run_history(arguments.seed, is_verbose=True)
        _say(history.report)
        return bool(history.problems)
    return run_many(range(arguments.seed, arguments.seed + arguments.histories), arguments.workers)


def run_many(seeds: range, num_workers: int) -> int:
    """Says which histories are bad, and every so often how many there were."""
    started_s, cpu_s, num_bad = time.monotonic(), 0.0, 0
    # Not forked: a process that begins anew has no state of others.
    with multiprocessing.get_context("spawn").Pool(num_workers) as workers:
        for count, (problem, took_s) in enumerate(workers.imap_unordered(examine, seeds), 1):
            cpu_s += took_s
            if problem:
                num_bad += 1
                _say(problem[:_SHOWN_CHARS])
            if count % _SAY_EVERY == 0 or count == len(seeds):
                lasted_s = time.monotonic() - started_s
                _say(
                    f"{count} histories in {lasted_s:.1f} s: {count / lasted_s * 60:.0f} a minute, "
                    f"{count / cpu_s * 60:.0f} a minute of a core; {num_bad} bad"
                )
    return bool(num_bad)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
