"""Who is told what a load does."""

from __future__ import annotations

from typing import Protocol

from splitserve_bench.load.outcome import Outcome


class Watcher(Protocol):
    """Order does not matter: several processes tell it, each when it comes to that."""

    def ended(self, outcome: Outcome) -> None:
        """Nothing more comes of a request."""

    def worked(self, busy_ratio: float) -> None:
        """So much of a second, or of a short round, a generator's thread was computing."""
