"""A clock that is never set back, on clocks that a test sets."""

from __future__ import annotations

from executor_service.steps.executor_info import steady_clock

HOUR = 3600 * 10**9


class Clocks:
    """What the machine says."""

    def __init__(self) -> None:
        self.wall_ns = 1000 * HOUR
        self.steady_ns = 5 * HOUR
        self.now_ns = steady_clock(lambda: self.wall_ns, lambda: self.steady_ns)

    def go_on(self, by_ns: int) -> None:
        self.wall_ns += by_ns
        self.steady_ns += by_ns


def test_clock_goes_on_when_the_wall_clock_is_set_back() -> None:
    clocks = Clocks()
    clocks.go_on(HOUR)
    clocks.wall_ns -= 300 * HOUR
    clocks.go_on(HOUR)
    assert clocks.now_ns() == 1002 * HOUR


def test_clock_follows_the_wall_clock_when_that_is_set_forward() -> None:
    clocks = Clocks()
    clocks.wall_ns += 300 * HOUR
    assert clocks.now_ns() == 1300 * HOUR
