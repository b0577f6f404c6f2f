"""docs/operations.md has every event that the services log, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGGING_PACKAGES = (
    "scheduler_service",
    "executor_service",
    "protos/splitserve_rpc",
    "protos/splitserve_options",
    "protos/splitserve_metrics",
    "protos/splitserve_tracing",
    "clients/splitserve_client",
    "clients/splitserve_cli",
    "clients/splitserve_gateway",
)
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
MAY_LOG = re.compile(rf"log\w*\s*\.\s*({'|'.join(METHODS)})\b")
# `registration.py` logs lines, so that it can tell whether they changed.
LINES = {"registered", "registration_refused", "scheduler_unreachable"}
REGISTRATION = ROOT / "executor_service" / "service" / "registration.py"


def logged_texts() -> Iterator[str]:
    """The constant texts of all calls of a logger, wherever they stand in the call or its file."""
    for package in LOGGING_PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
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
                    yield text_of(node, named)


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


def test_operations_lists_the_events_that_are_logged() -> None:
    document = (ROOT / "docs" / "operations.md").read_text()
    section = document.partition("\n## What the log says\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    formats = {re.split(r"[ :]", text)[0] for text in logged_texts()} - {"%s"}
    patterns = {name.replace("%s", r"\w+") for name in formats} | LINES

    assert sorted(listed) == sorted(set(listed))
    assert [name for name in listed if not any(re.fullmatch(p, name) for p in patterns)] == []
    assert [p for p in patterns if not any(re.fullmatch(p, name) for name in listed)] == []


def test_registration_still_says_its_lines() -> None:
    source = REGISTRATION.read_text()

    assert all(f'"{line}' in source for line in LINES)
