"""One mutant in a process of its own: plants it, and runs the test that must find it.

Ends with FOUND, SURVIVED or STALE; with another code if none of that can be said. The last line of
its output is its CPU time in seconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
import time
from pathlib import Path

import pytest

from tests.mutants.mutant import HISTORIES, StaleMutant, plant
from tests.mutants.mutants import MUTANTS
from tests.support.processes.fork_server import PLANTED

SURVIVED, FOUND, STALE = 0, 1, 97
_ROOT = Path(__file__).resolve().parents[2]
# A fault that makes its test run for ever is not found by it.
_MAX_CPU_S = 300
# Histories until a fault must have been found.
_MAX_HISTORIES = 200
_OPTIONS = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "-rN"),
    # The process that this one was forked off has imported a package around what is rewritten.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


class NoShrinking:
    """Examples of Hypothesis as in `make test`, but one that fails is enough.

    `seed`: for other examples than those; None for those.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants",
            settings.get_profile("any_time"),
            phases=(Phase.explicit, Phase.generate),
            derandomize=self._seed is None,
            database=None,
            report_multiple_bugs=False,
        )
        settings.load_profile("mutants")


def run_tests(node_ids: list[str], seed: int | None) -> int:
    """The exit code of pytest: SURVIVED, FOUND, or another one."""
    seeds = [] if seed is None else [f"--hypothesis-seed={seed}"]
    options = [*_OPTIONS, "--rootdir", str(_ROOT), *seeds]
    return int(pytest.main([*options, *node_ids], plugins=[NoShrinking(seed)]))


def _run_histories(draw: str, seed: int | None) -> int:
    # It imports what was changed.
    histories = importlib.import_module("tests.mutants.histories")
    first = _MAX_HISTORIES * (seed or 0)
    count = histories.num_until_wrong(draw, range(first, first + _MAX_HISTORIES))
    sys.stdout.write(f"histories until it was found: {count}\n")
    return SURVIVED if count is None else FOUND


def main() -> int:
    """The exit code says what became of the mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run_mutant", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--seed", type=int, help="for other examples than those of `make test`")
    parser.add_argument("--killer", help="another test than the one that must find it")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    started_s, mutant = time.process_time(), MUTANTS[arguments.name]
    killer, seed = arguments.killer or mutant.killer, arguments.seed
    try:
        plant(arguments.name, mutant)
        os.environ[PLANTED] = arguments.name
    except StaleMutant as stale:
        sys.stdout.write(f"{stale}\n")
        return STALE
    if killer.startswith(HISTORIES):
        code = _run_histories(killer.removeprefix(HISTORIES), seed)
    else:
        code = run_tests([killer], seed)
    sys.stdout.write(f"{time.process_time() - started_s:.1f}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
