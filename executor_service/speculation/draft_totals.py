"""What came of guesses, since the process began."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftTotals:
    """Written by the thread that computes, read by whoever shows it."""

    num_accepted: int = 0
    num_rejected: int = 0

    def add(self, num_guesses: int, num_right: int) -> None:
        """So many of the guesses of a row were what the model sampled itself."""
        self.num_accepted += num_right
        self.num_rejected += num_guesses - num_right
