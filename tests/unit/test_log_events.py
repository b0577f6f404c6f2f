"""docs/operations.md has every event that the services log, and no other."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from splitserve_common import LOGGING_PACKAGES

ROOT = Path(__file__).resolve().parents[2]
# Sentences about compiling, which the document has in words.
WITHOUT_EVENTS = "splitserve_kernels"
FOLDERS = {
    name: next(
        folder for root in ("", "common", "clients") if (folder := ROOT / root / name).is_dir()
    )
    for name in LOGGING_PACKAGES
    if name != WITHOUT_EVENTS
}
# Where what a process says of itself stands; the rooms that several share are in any part.
PARTS = {
    "scheduler_service": ("Scheduler",),
    "executor_service": ("Executor, while it starts", "Executor, while it serves"),
    "splitserve_gateway": ("Gateway",),
}
SHARED_PARTS = ("Every process", "Several processes")
# Empty: one that is found out when it is logged.
LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "critical",
    "log": "",
}
METHODS = LEVELS.keys()
ANY_NAME = r"\w+"
MAY_LOG = re.compile(rf"log\w*\s*\.\s*({'|'.join(METHODS)})\b")
# `registration.py` logs lines, so that it can tell whether they changed.
LINES = {"registered", "registration_refused", "scheduler_unreachable"}
REGISTRATION = ROOT / "executor_service" / "service" / "registration.py"


@dataclass(frozen=True, slots=True)
class Logged:
    """A call of a logger: its constant text, as which level, and of which package."""

    text: str
    level: str
    package: str

    @property
    def pattern(self) -> str:
        """Of the event's name."""
        return re.split(r"[ :]", self.text)[0].replace("%s", ANY_NAME)


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the document."""

    level: str
    part: str


@functools.cache
def log_calls() -> tuple[Logged, ...]:
    """All calls of a logger, wherever their texts stand in the call or its file."""
    # Those of `registration.py` have their names elsewhere: LINES.
    return tuple(each for each in _logged() if each.pattern != ANY_NAME)


def _logged() -> Iterator[Logged]:
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            source = path.read_text()
            # Most do not, and parsing takes a second and a half of each process of tests.
            if not MAY_LOG.search(source):
                continue
            tree = ast.parse(source)
            named = {
                target.id: node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and is_logging(node.func):
                    assert isinstance(node.func, ast.Attribute)
                    yield Logged(text_of(node, named), LEVELS[node.func.attr], package)


def is_logging(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in METHODS
        and isinstance(function.value, ast.Name)
        and "log" in function.value.id
    )


def text_of(call: ast.Call, named: dict[str, ast.expr]) -> str:
    assert isinstance(call.func, ast.Attribute)
    message = call.args[call.func.attr == "log"]
    if isinstance(message, ast.Name):
        message = named[message.id]
    assert isinstance(message, ast.Constant), ast.unparse(call)
    return str(message.value)


def listed() -> dict[str, Listed]:
    """What the document has, by the event's name."""
    document = (ROOT / "docs" / "operations.md").read_text()
    section = document.partition("\n## Log events\n")[2].partition("\n## ")[0]
    found: dict[str, Listed] = {}
    part = ""
    for line in section.splitlines():
        if heading := re.fullmatch(r"\*\*(.+)\*\*", line):
            part = heading[1]
        elif row := re.match(r"\| `(\w+)` \| ([\w ]+) \|", line):
            assert row[1] not in found, row[1]
            found[row[1]] = Listed(row[2], part)
    return found


def test_operations_lists_the_events_that_are_logged() -> None:
    patterns = {each.pattern for each in log_calls()} | LINES

    names = listed()
    assert [name for name in names if not any(re.fullmatch(p, name) for p in patterns)] == []
    assert [p for p in patterns if not any(re.fullmatch(p, name) for name in names)] == []


def test_operations_has_each_event_in_the_part_of_its_process_and_with_its_level() -> None:
    misplaced, mislevelled = set(), set()
    for each in log_calls():
        for name, row in listed().items():
            if not re.fullmatch(each.pattern, name):
                continue
            if row.part not in (*PARTS.get(each.package, (row.part,)), *SHARED_PARTS):
                misplaced.add((name, each.package, row.part))
            if each.level and each.pattern == name and not fits(each.level, row.level):
                mislevelled.add((name, each.level, row.level))
    assert misplaced == set()
    assert mislevelled == set()


def fits(level: str, said: str) -> bool:
    """Whether it is one of those that a row says: `info or warning`, `info to error`."""
    first, _, last = said.partition(" to ")
    if last:
        order = list(dict.fromkeys(LEVELS.values()))
        return order.index(first) <= order.index(level) <= order.index(last)
    return level in said.split(" or ")


def test_registration_still_says_its_lines() -> None:
    source = REGISTRATION.read_text()

    assert all(f'"{line}' in source for line in LINES)
