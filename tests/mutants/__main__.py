"""Plants the faults whose names have a text in common, or all, and looks for each.

`--seeds 5` tries five other sets of examples than that of `make test`, too: a fault that is found
in each of them is not found by luck. `--killer` tries another test. Ends with 1 if one survives.
"""

from __future__ import annotations

import argparse
import sys

from tests.mutants.mutants import MUTANTS
from tests.mutants.run_mutant import FOUND
from tests.support.processes.forked import run_process


def main() -> int:
    """The exit code is 1 if a fault is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("text", nargs="?", default="", help="a part of the names of some")
    parser.add_argument("--seeds", type=int, default=0, help="so many other sets of examples")
    parser.add_argument("--killer", help="another test than the ones that must find them")
    parser.add_argument("-v", action="store_true", help="say what the tests say")
    arguments = parser.parse_args()
    num_missed, total_s = 0, 0.0
    for name in (name for name in MUTANTS if arguments.text in name):
        killer, results = arguments.killer or MUTANTS[name].killer, list[str]()
        for seed in range(arguments.seeds + 1):
            options = [f"--seed={seed}"] * (seed > 0)
            ended = run_process("tests.mutants.run_mutant", name, "--killer", killer, *options)
            if arguments.v:
                sys.stdout.write(ended.stdout + ended.stderr)
            *_, cpu_s = ended.stdout.splitlines() or ["0"]
            is_found = ended.returncode == FOUND
            num_missed += not is_found
            total_s += float(cpu_s) if is_found else 0
            results.append(f"{cpu_s} s" if is_found else f"code {ended.returncode}")
        sys.stdout.write(f"{name} | {killer} | {', '.join(results)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{num_missed} not found; the others took {total_s:.0f} s of CPU\n")
    return bool(num_missed)


if __name__ == "__main__":
    sys.exit(main())
