"""docs/ name files, classes and functions as they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")),
    *(
        path
        for folder in ("benchmarks", "deploy", "tests")
        for path in sorted((ROOT / folder).rglob("README.md"))
        if "node_modules" not in path.parts
    ),
]
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
FIRST_CELL = re.compile(r"^\| `([\w/.]+)` \|", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
CELL = re.compile(r"(?<!\\)\|")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize(
    "package",
    [
        "executor_service",
        "scheduler_service/scheduler",
        "clients/splitserve_gateway",
        "clients/splitserve_bench",
    ],
)
def test_map_lists_every_folder_of_the_package(package: str) -> None:
    section = ARCHITECTURE.split(f"### `{package}`")[1].split("###")[0]
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}

    assert sorted(FIRST_CELL.findall(section)) == sorted(
        str(folder.relative_to(ROOT / package)) for folder in folders
    )


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


@pytest.mark.cases(22)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_files_that_exist(document: Path) -> None:
    text = document.read_text()
    known = {path.name for source in SOURCES for path in (ROOT / source).rglob("*.py")}
    named = {path.rpartition("/")[2] for path in re.findall(r"`([\w/]+\.py)`", text)}
    links = [link for link in LINK.findall(text) if "://" not in link]

    assert named - known == set()
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    tables = [table.splitlines() for table in TABLE.findall(text)]

    assert [
        row
        for table in tables
        for row in table
        if len(CELL.findall(row)) != len(CELL.findall(table[0]))
    ] == []


def test_adrs_are_numbered_without_gaps() -> None:
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs" / "adr").glob("*.md"))

    assert numbers == list(range(1, len(numbers) + 1))
