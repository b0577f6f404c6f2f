"""What was measured: a table for people, JSON for later."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

_PACKAGES = ("torch", "triton", "transformers", "flash_attn_3", "kernels", "numpy")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the table.

    `name` is the same in every run. `aim`: what was wanted; `is_met`: None where nothing was.
    """

    section: str
    name: str
    value: float | str
    unit: str = ""
    aim: str = ""
    is_met: bool | None = None
    note: str = ""


# A part of the check. It yields its measurements one by one, so that a failure costs what follows
# in this part only.
Section = Callable[[], Iterator[Measurement]]


def run_sections(
    sections: dict[str, Section], keep: Callable[[list[Measurement]], object]
) -> list[Measurement]:
    """Runs all, prints each line when it is known; a part that raises is a line that is not met.

    `keep` is given all lines so far after each part: what breaks off later costs that alone.
    """
    lines: list[Measurement] = []
    for name, section in sections.items():
        started = time.perf_counter()
        try:
            for measurement in section():
                lines.append(measurement)
                print_line(measurement)
        except Exception as error:
            # One part that does not work on a new machine is not to hide the others.
            traceback.print_exc()
            lines.append(Measurement("failed", name, type(error).__name__, is_met=False))
            print_line(lines[-1])
        lines.append(Measurement("time", name, time.perf_counter() - started, "s"))
        print_line(lines[-1])
        keep(lines)
    return lines


def print_line(line: Measurement) -> None:
    """Section, name, value, and whether an aim was met."""
    value = line.value if isinstance(line.value, str) else f"{line.value:.4g}"
    verdict = {None: "", True: "ok", False: "NOT MET"}[line.is_met]
    remarks = "; ".join(remark for remark in (line.aim, line.note) if remark)
    text = f"{line.section:<8} {line.name:<56} {value:>10} {line.unit:<9} {verdict:<7} {remarks}"
    sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()


def device_name(device: torch.device) -> str:
    """As its driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def save(lines: list[Measurement], device: torch.device, directory: Path) -> Path:
    """Writes `<date>-<device>.json`; returns where."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = device_name(device)
    path = directory / f"{today}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    content = {
        "date": today,
        "device": name,
        "commit": _commit(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "measurements": [asdict(line) for line in lines],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
