"""The recorded meaning of all fleets: one file for each family, one line for each fleet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.simulation.golden.fleets import fleets
from tests.simulation.golden.meaning import Meaning, differences, record, run

_FOLDER = Path(__file__).parent / "recorded"


def path_of(family: str) -> Path:
    """The file of a family."""
    return _FOLDER / f"{family}.jsonl"


def read(family: str) -> dict[str, Meaning]:
    """The recorded meanings of a family, by the name of the fleet."""
    meanings = map(Meaning.decode, path_of(family).read_text().splitlines())
    return {meaning.fleet: meaning for meaning in meanings}


def write(family: str, meanings: Iterable[Meaning]) -> None:
    """Writes the file of a family."""
    path_of(family).parent.mkdir(exist_ok=True)
    path_of(family).write_text("".join(f"{meaning.encode()}\n" for meaning in meanings))


def compare(family: str, numbers: slice = slice(None)) -> list[str]:
    """Runs fleets of a family, and tells what is otherwise than recorded."""
    recorded = read(family)
    found: list[str] = []
    for fleet in fleets(family)[numbers]:
        if fleet.name not in recorded:
            found.append(f"{fleet.name} is not recorded")
        else:
            found += differences(recorded[fleet.name], run(fleet))
    return found


def compare_one(task: tuple[str, int]) -> list[str]:
    """Compares one fleet, given by its family and its number there."""
    family, number = task
    return compare(family, slice(number, number + 1))


def record_one(task: tuple[str, int]) -> Meaning:
    """Runs one fleet for its record, given by its family and its number there."""
    family, number = task
    return record(fleets(family)[number])
