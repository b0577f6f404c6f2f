"""`make gpu-check`: is everything right on a GPU, and how fast is it? README.md says how to run it.

Parts run one after the other, each in a process of its own, and every line is in the result file as
soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = (_ROOT, *(_ROOT / folder for folder in ("common", "protos", "kernels", "clients")))
# Where none of these is on the path.
sys.path[:0] = [str(path) for path in _SOURCES if str(path) not in sys.path]

from benchmarks.gpu_check.part_process import (  # noqa: E402
    FLASH_ATTENTION_3_FROM,
    GRACE_S,
    part_command,
    run_part_apart,
)
from benchmarks.gpu_check.parts import PARTS, Part, wanted_parts  # noqa: E402
from benchmarks.gpu_check.results import ResultFile, print_summary  # noqa: E402

_RESULTS = _ROOT / "benchmarks" / "results"
_BUDGET_S, _TOTAL_S = 480.0, 10**6
_DESCRIBE_TIMEOUT_S = 180
# Of the description of a machine, as `machine` has it: that module imports torch.
_REFUSED = "flash_attn_3_refused"
# As the executor's option takes it.
_HUB = "hub"


def main(flags: list[str] | None = None) -> int:
    """Exit code: 0 if all is right and met, 1 if something is not, 2 without a GPU."""
    begun_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU: does it all run?")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="directory of the result file")
    parser.add_argument("--only", nargs="*", metavar="PART", help="these parts; see --list")
    parser.add_argument("--list", action="store_true", help="the parts, and what each decides")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=_BUDGET_S,
        help="of each part; what does not fit is skipped",
    )
    parser.add_argument(
        "--total-s",
        type=float,
        default=_TOTAL_S,
        help="of the whole call: no part goes on beyond it, not even to end",
    )
    parser.add_argument("--commit", help="what is checked, where there is no git")
    parser.add_argument(
        "--fa3", metavar="FILE", help="where flash-attn 3 is from: a library, or hub (README.md)"
    )
    arguments = parser.parse_args(flags)
    try:
        parts = wanted_parts(arguments.only, is_smoke=arguments.smoke)
        more = _flash_attention_3(arguments.fa3)
    except ValueError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2
    if arguments.list:
        for part in PARTS:
            sys.stdout.write(f"{part.name:<15} {part.seconds:>4} s  {part.decides}\n")
        return 0
    end_s = begun_s + arguments.total_s - GRACE_S
    return _check(parts, arguments, {**_environment(), **more}, end_s)


def _flash_attention_3(source: str | None) -> dict[str, str]:
    """For the environment of parts. Raises ValueError."""
    if source in (None, _HUB):
        return {} if source is None else {FLASH_ATTENTION_3_FROM: _HUB}
    path = Path(source).resolve()
    if not path.is_file():
        raise ValueError(f"--fa3 {source}: there is no such file; allowed: a library, or {_HUB}")
    return {FLASH_ATTENTION_3_FROM: str(path)}


def _check(
    parts: list[Part],
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    end_s: float,
) -> int:
    """`end_s`: of all parts, by the monotonic clock."""
    # In a process of its own: this one takes no memory of the device.
    machine = _describe(arguments.commit, environment, is_smoke=arguments.smoke)
    if machine is None:
        sys.stderr.write("gpu-check: there is no CUDA device here (or torch has no CUDA)\n")
        return 2
    refused = machine.get(_REFUSED)
    if arguments.fa3 is not None and refused is not None:
        # Asked for, it is never left out silently.
        sys.stderr.write(f"gpu-check: --fa3 {arguments.fa3}: {refused}\n")
        return 2
    file = ResultFile(_result_path(arguments.out, machine))
    file.describe(machine)
    # What runs then is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for part in parts:
        part_end_s = min(end_s, time.monotonic() + arguments.budget_s)
        if arguments.smoke:
            _smoke(part, part_end_s, file)
            continue
        run_part_apart(part, part_command(part, file.path), part_end_s, file, environment)
    return 1 if print_summary(file) else 0


def _smoke(part: Part, end_s: float, file: ResultFile) -> None:
    """In this process, and on the CPU: what a device could do is nothing to learn here."""
    from benchmarks.gpu_check.cases import Schedule
    from benchmarks.gpu_check.part_runner import run_part
    from benchmarks.gpu_check.smoke import prepare

    run_part(part, prepare(), Schedule(end_s), file)


def _describe(
    commit: str | None, environment: Mapping[str, str], *, is_smoke: bool
) -> Mapping[str, Any] | None:
    """What the machine is; None if it has no GPU. What is wrong else is on stderr."""
    if is_smoke:
        # Triton reads it when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
        import torch

        from benchmarks.gpu_check.machine import describe

        return describe(torch.device("cpu"), commit)
    command = [sys.executable, "-m", "benchmarks.gpu_check.machine", *([commit] if commit else [])]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=_DESCRIBE_TIMEOUT_S,
        env=environment,
        cwd=_ROOT,
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    return json.loads(last) if done.returncode == 0 else None


def _environment() -> dict[str, str]:
    path = [str(source) for source in _SOURCES] + [os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
    }


def _result_path(directory: Path, machine: Mapping[str, Any]) -> Path:
    device = re.sub(r"[^a-z0-9]+", "-", str(machine["device"]).lower()).strip("-")
    when = f"{machine['date']}T{str(machine['time']).replace(':', '')}"
    return directory.resolve() / f"{when}-{device}.jsonl"


if __name__ == "__main__":
    sys.exit(main())
