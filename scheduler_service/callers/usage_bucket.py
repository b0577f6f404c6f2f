"""A bucket of what a tenant used lately, which empties at the pace of its limit."""

from __future__ import annotations

import math

_MINUTE_NS = 60 * 10**9
# A limit may be so low that whoever waits for it asks again before.
_MAX_DELAY_S = 86400.0
_ROUNDING = 1e-6


class UsageBucket:
    """What was used and has not been given time for yet.

    It holds a minute's worth, may be overdrawn, and empties by the limit of each moment: there is
    nothing to convert when that changes. Limits are above 0. `now_ns` never goes back.
    """

    def __init__(self) -> None:
        self._used = 0.0
        self._at_ns = 0

    def use(self, amount: float, per_minute: float, now_ns: int) -> None:
        """Adds to what was used; a negative amount gives back."""
        self._used = max(0.0, self.used(per_minute, now_ns) + amount)
        self._at_ns = now_ns

    def used(self, per_minute: float, now_ns: int) -> float:
        """What is used now."""
        return max(0.0, self._used - per_minute * (now_ns - self._at_ns) / _MINUTE_NS)

    def delay_s(self, per_minute: float, now_ns: int, *, debt: float = 0.0) -> float:
        """0 if there is room for one more, else when there will be.

        `debt`: how far beyond a minute's worth it may be overdrawn; negative: so much less may come
        at once.
        """
        # Limits below one a minute have room for one.
        room = max(per_minute, min(math.ceil(per_minute), 1.0)) + debt
        excess = self.used(per_minute, now_ns) + 1.0 - room
        if excess <= _ROUNDING:
            return 0.0
        # A millisecond later than the sum says, which is rounded.
        delay_ms = min(60_000.0 * excess / per_minute + 1, 1000.0 * _MAX_DELAY_S)
        return math.floor(delay_ms) / 1000.0
