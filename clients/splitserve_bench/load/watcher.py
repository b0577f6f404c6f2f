"""Who is told what a load does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from splitserve_bench.load.outcome import Outcome


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An open loop sends no more: it is `behind_s` behind the times of its load.

    It is so `after_s` after its begin, with `num_begun` conversations that it did begin.
    """

    behind_s: float
    after_s: float
    num_begun: int


class Watcher(Protocol):
    """Order does not matter: several processes tell it, each when it comes to that."""

    def ended(self, outcome: Outcome) -> None:
        """Nothing more comes of a request."""

    def worked(self, busy_ratio: float) -> None:
        """So much of a second, or of a short round, a generator's thread was computing."""

    def gave_up(self, given_up: GivenUp) -> None:
        """A generator begins nothing more in this round; what runs goes on."""
