"""What was measured: a line for people, and one of JSON in a file that is complete at any time."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The value of what was not tried, for want of time.
SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line.

    `name` is the same in every run, and no other line of its part has it. `aim`: what was wanted;
    `is_met`: None where nothing was, or where this device is not to be judged by it.
    """

    name: str
    value: float | str
    unit: str = ""
    aim: str = ""
    is_met: bool | None = None
    note: str = ""


class ResultFile:
    """Lines of JSON: first what the machine is, then what each part found, in this order.

    A line is in the file when it has been added: whatever ends the process takes no line with it.
    """

    def __init__(self, path: Path) -> None:
        """Of a file that may be there already: lines are added to it."""
        self.path = path

    def describe(self, machine: Mapping[str, Any]) -> None:
        """The first line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append(machine)

    def begin(self, part: str, case: str) -> None:
        """Says what is tried now: if the process ends before it is over, that was the reason."""
        self._append({"part": part, "began": case})

    def add(self, part: str, line: Measurement) -> None:
        """Keeps `line` and prints it."""
        self._append({"part": part, **asdict(line)})
        print_line(part, line)

    def entries(self) -> list[dict[str, Any]]:
        """All lines."""
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def measurements(self) -> list[dict[str, Any]]:
        """The lines that parts added."""
        return [entry for entry in self.entries() if "name" in entry]

    def last_begun(self, part: str) -> str | None:
        """The last case of `part` that was tried."""
        begun = [entry["began"] for entry in self.entries() if "began" in entry]
        parts = [entry["part"] for entry in self.entries() if "began" in entry]
        return begun[-1] if parts and parts[-1] == part else None

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def print_line(part: str, line: Measurement) -> None:
    """Part, name, value, and whether an aim was met."""
    value = line.value if isinstance(line.value, str) else f"{line.value:.4g}"
    verdict = {None: "", True: "met", False: "MISSED"}[line.is_met]
    remarks = "; ".join(remark for remark in (line.aim, line.note) if remark)
    text = f"{part:<9} {line.name:<60} {value:>9} {line.unit:<12} {verdict:<6} {remarks}"
    sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()


def print_summary(file: ResultFile) -> int:
    """How many lines were not met, which these were, and where all are; returns their number."""
    lines = file.measurements()
    missed = [line for line in lines if line["is_met"] is False]
    num_skipped = sum(line["value"] == SKIPPED for line in lines)
    for line in missed:
        sys.stdout.write(
            f"missed: {line['part']}: {line['name']}: {line['value']} {line['unit']}"
            f" {line['aim']} {line['note']}".rstrip()[:300]
            + "\n"
        )
    sys.stdout.write(
        f"{len(lines)} lines, {num_skipped} skipped, {len(missed)} missed; in {file.path}\n"
    )
    return len(missed)
