"""What parties may take of what there are only so many of: places, bytes.

Nobody knows how many come, so nobody is given a fixed part. A party may take more as long as what
it has is at most `HELD_PER_LEFT` times what it leaves. One that takes all it can leaves a
seventeenth to others, and one that has nothing may take anything. Schedulers share by the same
rule.
"""

from __future__ import annotations

HELD_PER_LEFT = 16


class Shares:
    """So many of something, and who has how many of it. `num_held`: of all, now."""

    def __init__(self, num_all: int) -> None:
        self.num_all = num_all
        self.num_held = 0
        self._held_by: dict[str, int] = {}

    def may_take(self, party: str | None, num: int) -> bool:
        """Whether `party` may take `num` more. None: parties are not told apart, all is theirs."""
        num_left = self.num_all - self.num_held - num
        if num_left < 0:
            return False
        held = 0 if party is None else self._held_by.get(party, 0)
        return held <= HELD_PER_LEFT * num_left or held == 0

    def take(self, party: str | None, num: int) -> None:
        """It may."""
        self.num_held += num
        if party is not None:
            self._held_by[party] = self._held_by.get(party, 0) + num

    def give_back(self, party: str | None, num: int) -> None:
        """Of what it took."""
        self.num_held -= num
        if party is not None:
            self._held_by[party] -= num
            if not self._held_by[party]:
                # Nothing is kept of whoever has nothing.
                del self._held_by[party]
