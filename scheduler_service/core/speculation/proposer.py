"""Whoever guesses what follows the tokens of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_service.core.request import Int32Array, Int64Array
from scheduler_service.core.speculation.pass_times import Float64Array


class Proposer(Protocol):
    """Guesses the next tokens of rows by those that are known.

    It never says when to guess: whether that pays is found from how often guesses were right. That
    is learned of all rows, whether somebody used the guesses or not, so a row that begins to repeat
    itself is noticed.
    """

    def look(self, row_ids: Int64Array) -> list[int]:
        """Reads what these rows have got since it was asked last; those that have a guess now."""
        ...

    def chances(self, row_ids: Sequence[int], most: int) -> Float64Array:
        """For rows [K] that have a guess, [K, `most`]: how probably so many guesses are all right.

        By what became of those before.
        """
        ...

    def propose(self, row_id: int, most: int) -> Int32Array:
        """The next tokens of a row that has a guess, [`most`]."""
        ...
