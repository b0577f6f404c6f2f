"""Cases of a part, one after the other: each fails alone, none begins that has no time left."""

from __future__ import annotations

import faulthandler
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.results import SKIPPED, Measurement, ResultFile
from executor_service.errors import one_line

# A case that takes so many times its estimate, and a minute, hangs.
_PATIENCE = 6


@dataclass(frozen=True, slots=True)
class Case:
    """`seconds`: what it takes on an H100, compilers included; an estimate, rather too large."""

    name: str
    seconds: float
    run: Callable[[], Iterable[Measurement]]


class DeviceLost(Exception):
    """After an error of a kernel the process cannot use the device any more."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`end_s`: by the monotonic clock. `after`: cases up to this one were tried before."""

    end_s: float
    after: str | None = None

    @property
    def left_s(self) -> float:
        """Seconds."""
        return self.end_s - time.monotonic()


def run_cases(
    part: str, cases: Iterator[Case], schedule: Schedule, file: ResultFile, device: torch.device
) -> None:
    """Tries all, in order. Raises DeviceLost, and what making cases raises."""
    after = schedule.after
    for case in cases:
        if after is not None:
            after = None if case.name == after else after
            continue
        if schedule.left_s < case.seconds:
            note = f"may take {case.seconds:.0f} s, {max(0, schedule.left_s):.0f} s are left"
            file.add(part, Measurement(case.name, SKIPPED, note=note))
            continue
        file.begin(part, case.name)
        if device.type == "cuda":
            # It says where all threads are, and ends the process, also if that waits for ever.
            faulthandler.dump_traceback_later(60 + _PATIENCE * case.seconds, exit=True)
        try:
            _run(part, case, file)
        finally:
            if device.type == "cuda":
                faulthandler.cancel_dump_traceback_later()
        _clear_up(device)


def _run(part: str, case: Case, file: ResultFile) -> None:
    try:
        for line in case.run():
            file.add(part, line)
    except Exception as error:  # a new machine may find anything, which is not to hide the rest
        traceback.print_exc()
        reason = f"{type(error).__name__}: {one_line(error)}"
        if error.__cause__ is not None:
            reason += f" ({one_line(error.__cause__)})"
        file.add(part, Measurement(f"{case.name}: failed", reason[:300], is_met=False))


def _clear_up(device: torch.device) -> None:
    gc.collect()  # models hold themselves
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(one_line(error)) from error
