"""What `make test` leaves out, CI runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tests.support.thorough import check_reasons, leave_cases

ROOT = Path(__file__).resolve().parents[2]


def test_ci_runs_what_leaves_nothing_out() -> None:
    makefile = (ROOT / "Makefile").read_text()
    # One recipe for both tiers. (A dry run would run $(MAKE).)
    recipe = re.search(r"^test: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    assert "$(PYTEST) $(if $(filter all,$(TIER)),,-m 'not thorough') $(TESTS) ||" in recipe[1]
    assert "test-all:\n\t@$(MAKE) --no-print-directory test TIER=all\n" in makefile
    assert "\nTIER ?= quick\n" in makefile
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test TIER=all"
    assert "- run: bash .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text()


@pytest.mark.parametrize("reasons", [(), ("",), (" ",), (7,), ("slow", "very")])
def test_thorough_test_is_refused_when_no_reason_is_given(
    request: pytest.FixtureRequest, reasons: tuple[object, ...]
) -> None:
    request.node.add_marker(pytest.mark.thorough(*reasons))
    with pytest.raises(pytest.UsageError, match="thorough needs one reason"):
        check_reasons([request.node])


def test_thorough_test_is_taken_when_it_says_why(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.thorough("it takes a minute; a part of it stays"))
    check_reasons([request.node])
    assert request.node.get_closest_marker("thorough") is not None


@dataclass
class Case:
    """As much of an item as is looked at."""

    nodeid: str
    marks: list[pytest.Mark]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


@pytest.mark.parametrize("num", [1, 5, 12, 13])
def test_as_many_cases_stay_as_the_mark_says_and_other_tests_are_left_alone(num: int) -> None:
    few = pytest.mark.cases(num).mark
    ours = [Case(f"a.py::test[{x}-{y}]", [few]) for x in range(4) for y in range(3)]
    others = [Case("a.py::test_other", [])]
    leave_cases(cast(list[pytest.Item], [*ours, *others]))

    stay = [case for case in ours if case.get_closest_marker("thorough") is None]
    assert len(stay) == min(num, 12)
    assert others[0].marks == []


def test_cases_that_stay_have_all_values_of_each_parameter() -> None:
    ours = [Case(f"{x}{y}{z}", []) for x in "ab" for y in "cdef" for z in "ghij"]
    named = [Case(f"t[{case.nodeid}]", [pytest.mark.cases(8).mark]) for case in ours]
    leave_cases(cast(list[pytest.Item], named))

    stay = [case.nodeid for case in named if case.get_closest_marker("thorough") is None]
    assert {letter for name in stay for letter in name[2:-1]} == set("abcdefghij")
