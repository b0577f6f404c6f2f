"""What `make test` leaves out, CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.thorough import check_reasons

ROOT = Path(__file__).resolve().parents[2]


def test_ci_runs_what_leaves_nothing_out() -> None:
    makefile = (ROOT / "Makefile").read_text()
    # One recipe for both; only `test` says what is left out. (A dry run would run $(MAKE).)
    both = re.search(r"^test test-all: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert both is not None
    assert "$(PYTEST) $(TIER) ||" in both[1]
    tiers = re.findall(r"^(.*\bTIER) *:?= *(.*)$", makefile, re.MULTILINE)
    assert tiers == [("TIER", ""), ("test: TIER", "-m 'not thorough'")]
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test-all"


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
