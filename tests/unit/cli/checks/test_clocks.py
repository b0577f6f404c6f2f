"""A clock elsewhere, and how well it can be known."""

from __future__ import annotations

import pytest

from splitserve_cli.checks.cluster import check_clock
from splitserve_cli.checks.finding import State


@pytest.mark.parametrize(
    ("ahead_s", "state", "found"),
    [
        (0.0, State.OK, "agrees with ours, within 0.200 s"),
        (0.09, State.OK, "agrees"),
        (0.5, State.OK, "0.4 s ahead of ours at least"),
        (5.0, State.WARNING, "4.9 s ahead of ours at least"),
        (-5.0, State.WARNING, "4.9 s behind ours at least"),
        (3600.0, State.WRONG, "3599.9 s ahead"),
        (-3600.0, State.WRONG, "3599.9 s behind"),
    ],
)
def test_clock_is_as_far_off_as_can_be_said_for_sure(
    ahead_s: float, state: State, found: str
) -> None:
    finding = check_clock("clock", 1000.1 + ahead_s, 1000.0, 1000.2)
    assert finding.state is state
    assert finding.found.startswith(found)


def test_clock_that_says_whole_seconds_may_be_almost_one_later() -> None:
    assert check_clock("clock", 1000.0, 1000.9, 1000.95, resolution_s=1.0).state is State.OK
    assert check_clock("clock", 998.0, 1000.9, 1000.95, resolution_s=1.0).state is State.WARNING
