"""Runs one part in this process; see `part_process`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.gpu_check.cases import DeviceLost, Schedule, run_cases
from benchmarks.gpu_check.part_process import DEVICE_LOST
from benchmarks.gpu_check.parts import Part, wanted_parts
from benchmarks.gpu_check.results import Measurement, ResultFile
from benchmarks.gpu_check.sizes import Sizes, full_sizes
from executor_service.errors import one_line


def main() -> int:
    """Exit code: 0 when all cases were tried, whatever came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--left-s", type=float, required=True)
    parser.add_argument("--after")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    schedule = Schedule(time.monotonic() + arguments.left_s, arguments.after)
    (part,) = wanted_parts([arguments.part])
    try:
        run_part(part, full_sizes(), schedule, ResultFile(arguments.results))
    except DeviceLost as error:
        sys.stderr.write(f"gpu-check: the device is lost: {error}\n")
        return DEVICE_LOST
    return 0


def run_part(part: Part, sizes: Sizes, schedule: Schedule, file: ResultFile) -> None:
    """All cases, the time they took, and what was wrong by the log. Raises DeviceLost."""
    errors = _LoggedErrors()
    logger = logging.getLogger("executor_service")
    logger.addHandler(errors)
    started = time.perf_counter()
    try:
        with torch.inference_mode():
            run_cases(part.name, part.make_cases(sizes), schedule, file, sizes.device)
    except DeviceLost:
        raise
    except Exception as error:  # of what stands before the cases
        traceback.print_exc()
        reason = f"{type(error).__name__}: {one_line(error)}"[:300]
        file.add(part.name, Measurement("what cases need: failed", reason, is_met=False))
    finally:
        logger.removeHandler(errors)
    if not part.expects_errors:
        # What is refused at start is replaced there, so that it shows nowhere else.
        for message in dict.fromkeys(errors.messages):
            line = Measurement(f"log: {message[:150]}", "error", is_met=False)
            file.add(part.name, line)
    file.add(part.name, Measurement("all of it", time.perf_counter() - started, "s"))


class _LoggedErrors(logging.Handler):
    """Keeps the messages of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one."""
        self.messages.append(record.getMessage())


if __name__ == "__main__":
    sys.exit(main())
