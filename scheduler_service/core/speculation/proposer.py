"""Whoever guesses what follows the tokens of rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler_service.core.request import BoolArray, Int32Array, Int64Array

Float64Array = npt.NDArray[np.float64]


class Proposer(Protocol):
    """Guesses the next tokens of rows by those that are known.

    It never says when to guess: whether that pays is found from `acceptance`, [N], how often the
    next guess for each row was right, by a running average. That is learned of all rows, whether
    somebody used the guesses or not, so a row that begins to repeat itself is noticed.
    """

    acceptance: Float64Array

    def look(self, row_ids: Int64Array) -> BoolArray:
        """Reads what these rows have got since it was asked last; [R], who has a guess now."""
        ...

    def propose(self, row_id: int, most: int) -> Int32Array:
        """The next tokens of a row that has a guess, [`most`] or fewer."""
        ...
