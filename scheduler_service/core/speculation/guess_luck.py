"""How often guesses were right, by what is known of them when they are made.

A copy that has been right for long will go on, the first guess after a match of one token may be
right or not: one mean of both would make drafts too short for the one, too long for the other. So
each row has a mean for each kind of guess, and a draft goes through several kinds: what follows a
right guess is a longer copy.

Shape letters: K rows, D guesses of each, S kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler_service.core.speculation.pass_times import Float64Array

# Copies are told apart up to this length, in tokens that are the same.
LONGEST = 16
# Behind a token that was changed in a copy, which may go on.
BEHIND_CHANGE = 0
# The kind of a guess by the length of the copy: of 1, 2, 3, 4 to 7, 8 to 15 tokens, of more.
_KINDS = np.array([1, 1, 2, 3, *[4] * 4, *[5] * 8, 6], np.int64)
KIND_OF_LENGTH: tuple[int, ...] = tuple(_KINDS.tolist())
# What is assumed of each kind in a row of which nothing is known; that counts as much as so many
# guesses. Later ones are forgotten: that many count.
_ASSUMED = (0.5, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92)
_ASSUMED_WEIGHT = 3
_MOST_COUNTED = 20


class GuessLuck:
    """Of each row, by kind, the mean of guesses: 1 if right, or 0."""

    def __init__(self, max_num_rows: int) -> None:
        self._means = [list(_ASSUMED) for _ in range(max_num_rows)]
        self._counts = [[0] * len(_ASSUMED) for _ in range(max_num_rows)]

    def begin(self, row_id: int) -> None:
        """Nothing is known of the row any more."""
        self._means[row_id] = list(_ASSUMED)
        self._counts[row_id] = [0] * len(_ASSUMED)

    def add(self, row_id: int, kind: int, is_right: bool) -> None:
        """A guess of that kind was right, or not."""
        means, counts = self._means[row_id], self._counts[row_id]
        counts[kind] = min(counts[kind] + 1, _MOST_COUNTED)
        means[kind] += (is_right - means[kind]) / (_ASSUMED_WEIGHT + counts[kind])

    def mean(self, row_id: int, kind: int) -> float:
        """How probably a guess of that kind is right."""
        return self._means[row_id][kind]

    def chances(
        self, row_ids: Sequence[int], kinds: Sequence[int], lengths: Sequence[int], most: int
    ) -> Float64Array:
        """[K, `most`]: how probably the first of its guesses are all right, for each number.

        `kinds`, `lengths`: [K] each, of the first guess, and of the copy that it would continue.
        """
        means = np.array([self._means[row_id] for row_id in row_ids])
        later = np.array(lengths, np.int64)[:, None] + np.arange(most)
        path = _KINDS[np.minimum(later, LONGEST)]
        path[:, :1] = np.array(kinds)[:, None]
        chances: Float64Array = np.cumprod(np.take_along_axis(means, path, axis=1), axis=1)
        return chances
