"""docs/ name files, classes and functions as they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
SOURCES = (
    "scheduler_service",
    "executor_service",
    "common",
    "protos",
    "kernels",
    "clients",
    "tests",
)
STATION = re.compile(r"^\| \d+ \| `([\w.]+)` \| `([\w/]+\.py)` \|", re.MULTILINE)
ROOM = re.compile(r"^\| `([\w/.]+)` \| [^|]+ \| ((?:`\w+` ?)+)\|$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
CELL = re.compile(r"(?<!\\)\|")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def files_of(package: str, room: str) -> set[str]:
    return {path.stem for path in (ROOT / package / room).glob("*.py")} - {"__init__"}


def mapped(package: str) -> dict[str, set[str]]:
    section = ARCHITECTURE.split(f"### `{package}`")[1].split("###")[0]
    rooms: dict[str, set[str]] = {}
    for room, files in ROOM.findall(section):
        rooms.setdefault(room, set()).update(re.findall(r"\w+", files))
    return rooms


@pytest.mark.parametrize(
    ("package", "named_in_the_text"),
    [
        (
            "executor_service",
            {"__main__", "config", "engine_loader", "errors"},
        ),
        ("scheduler_service/scheduler", set()),
        (
            "clients/splitserve_gateway",
            {
                *("__main__", "app", "config", "healthcheck", "live_page"),
                *("metrics", "server", "tracing"),
            },
        ),
        (
            "clients/splitserve_bench",
            {
                *("__main__", "arguments", "command", "load_process", "parser", "runs"),
            },
        ),
    ],
)
def test_map_has_every_file_in_its_room(package: str, named_in_the_text: set[str]) -> None:
    rooms = mapped(package)
    rooms.setdefault(".", set()).update(named_in_the_text)
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    expected = {str(folder.relative_to(ROOT / package)) for folder in folders}

    assert {room.strip("/") or "." for room in rooms} == expected
    assert rooms == {room: files_of(package, room) for room in rooms}


def test_stations_are_where_the_document_says() -> None:
    stations = STATION.findall(ARCHITECTURE)
    missing = []
    for name, path in stations:
        body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            found = [n for n in body if getattr(n, "name", None) == part]
            if not found:
                missing.append((name, path))
                break
            body = getattr(found[0], "body", [])

    assert stations
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_document_names_files_that_exist(document: Path) -> None:
    text = document.read_text()
    known = {path.name for source in SOURCES for path in (ROOT / source).rglob("*.py")}
    named = {path.rpartition("/")[2] for path in re.findall(r"`([\w/]+\.py)`", text)}
    links = [link for link in LINK.findall(text) if "://" not in link]

    assert named - known == set()
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_limits_name_modules_that_exist() -> None:
    modules = {
        "/".join(path.with_suffix("").parts[-2:])
        for source in SOURCES
        for path in (ROOT / source).rglob("*.py")
    }
    rows = [
        line for line in (ROOT / "docs" / "limits.md").read_text().splitlines() if line[:1] == "|"
    ]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+/[a-z_0-9]+)`", row)}

    assert named
    assert named - modules == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_rows_of_a_table_have_as_many_cells(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    tables = [table.splitlines() for table in TABLE.findall(text)]

    assert [
        row
        for table in tables
        for row in table
        if len(CELL.findall(row)) != len(CELL.findall(table[0]))
    ] == []


def test_stations_of_a_way_are_numbered_without_a_gap() -> None:
    ways = [
        re.findall(r"^\| (\d+) \|", table, re.MULTILINE) for table in TABLE.findall(ARCHITECTURE)
    ]

    assert any(ways)
    assert [way for way in ways if way != [str(i + 1) for i in range(len(way))]] == []
