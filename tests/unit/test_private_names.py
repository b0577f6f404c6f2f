"""Tests look at what is public: how a service keeps its state is its own, and may change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = (
    "chaos",
    "integration",
    "property",
    "replay",
    "support/core",
    "support/processes",
    "unit/rpc",
    "unit/scheduler",
)
# Names of others than the services.
ALLOWED = {
    ("unit/scheduler/journal/test_checkpoint.py", "_reconstructor"): "copyreg's, in a pickle",
    ("integration/test_json_logs.py", "_service"): "how names of packages end",
    ("unit/scheduler/watching/test_watching_metrics.py", "_bucket"): "how names of samples end",
}
# As an attribute, or as text for `getattr`, `monkeypatch` and the like. No double underscore.
_PRIVATE = re.compile(r"([A-Za-z]\w*\.)*_[A-Za-z]\w*")


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Lines that touch a private name of something else than the object that they are in."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        match node:
            case ast.Attribute(value=owner, attr=name) if not _is_own(owner):
                names = [name]
            case ast.ImportFrom(names=imported):
                names = [alias.name for alias in imported]
            case ast.Constant(value=str() as text):
                names = [text]
        yield from ((node.lineno, name) for name in names if _PRIVATE.fullmatch(name))  # type: ignore[attr-defined]


def _is_own(owner: ast.expr) -> bool:
    match owner:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


@pytest.mark.parametrize("folder", FOLDERS)
def test_tests_touch_nothing_private(folder: str) -> None:
    paths = sorted((TESTS / folder).rglob("*.py"))
    assert paths
    found = [
        f"{name}:{line}: {private}"
        for path in paths
        for name in (path.relative_to(TESTS).as_posix(),)
        for line, private in private_names(path.read_text())
        if (name, private) not in ALLOWED
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("driver.core._placement.preempt(request)", "_placement"),
        ("core._needs_snapshot = True", "_needs_snapshot"),
        ("driver.core.parts()[0]._rows", "_rows"),
        ("getattr(core, '_growing')", "_growing"),
        ("monkeypatch.setattr(Scheduler, '_plan', plan)", "_plan"),
        ("monkeypatch.setattr('service.core._plan', plan)", "service.core._plan"),
        ("from scheduler_service.scheduler.values.request import _has_run", "_has_run"),
    ],
)
def test_private_name_is_found_when_a_test_touches_it(source: str, name: str) -> None:
    assert list(private_names(source)) == [(1, name)]


@pytest.mark.parametrize(
    "source",
    [
        "self._engine.step()",
        "super()._deliver(events)",
        "core.__dict__",
        "for _ in _rows: pass",
        '"_"',
    ],
)
def test_name_is_nobodys_secret_when_it_is_ones_own(source: str) -> None:
    assert list(private_names(source)) == []
