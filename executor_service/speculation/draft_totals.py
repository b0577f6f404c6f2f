"""Counts of accepted and rejected draft tokens since the start of the process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftTotals:
    """Counts of draft tokens. The computing thread writes them, metrics read them."""

    num_accepted: int = 0
    num_rejected: int = 0

    def add(self, num_guesses: int, num_right: int) -> None:
        """Counts guesses of a row, of which `num_right` were what the model sampled itself."""
        self.num_accepted += num_right
        self.num_rejected += num_guesses - num_right
