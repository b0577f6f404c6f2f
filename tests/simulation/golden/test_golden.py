"""Fleets mean what they meant when they were recorded; see README.md of the folder above."""

from __future__ import annotations

import pytest

from tests.simulation.golden.fleets import FAMILIES, fleets
from tests.simulation.golden.meaning import compare, read

# Fleets that one case runs.
_NUM_TOGETHER = 5
_CASES = [
    (family, first) for family in FAMILIES for first in range(0, len(fleets(family)), _NUM_TOGETHER)
]


@pytest.mark.cases(9)
@pytest.mark.parametrize(("family", "first"), _CASES)
def test_fleet_means_what_was_recorded(family: str, first: int) -> None:
    found = compare(family, slice(first, first + _NUM_TOGETHER))

    assert not found, "\n".join(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_record_has_all_fleets_and_no_other(family: str) -> None:
    assert list(read(family)) == [fleet.name for fleet in fleets(family)]
