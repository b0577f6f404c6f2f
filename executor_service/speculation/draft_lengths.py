"""How many guesses of each row are worth verifying, by what became of those before.

A row whose guesses are right with probability p gets 1 + p + .. + p^d tokens of d guesses. A turn
takes the time to guess, by the longest row, and the time to verify, by all tokens. Taken are the
numbers that bring most tokens a second, none if that is more without; measured is all of it.

Shape letter: K rows of a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from executor_service.speculation.pass_times import PassTimes
from executor_service.steps.step import Int32Array

MAX_GUESSES = 16
# What is believed of guesses before any were verified, and how much that counts beside those.
_ASSUMED_RATIO, _ASSUMED_WEIGHT = 0.7, 2.0
# Of older turns, how much counts when another one comes; of a turn without guesses, less is
# forgotten: each brings a row a little nearer to what is believed of all.
_KEPT, _KEPT_WITHOUT = 0.9, 0.995
# What guesses must promise to bring: less is within the noise of what is measured.
_LEAST_GAIN = 1.03
# No clock tells less.
_LEAST_S = 1e-9


@dataclass(slots=True)
class Luck:
    """How many guesses were verified, and how many of them were right; older ones count less."""

    num_right: float = 0.0
    num_tried: float = 0.0

    def add(self, num_guesses: int, num_right: int) -> None:
        """So many of the guesses of a turn were right; what is behind a wrong one was not tried."""
        tried = min(num_guesses, num_right + 1)
        self.num_right = _KEPT * self.num_right + num_right
        self.num_tried = _KEPT * self.num_tried + tried

    def fade(self) -> None:
        """A turn without guesses."""
        self.num_right *= _KEPT_WITHOUT
        self.num_tried *= _KEPT_WITHOUT

    def ratio(self, assumed: float) -> float:
        """The probability that a guess is right, if `assumed` is what is so of others."""
        right = self.num_right + _ASSUMED_WEIGHT * assumed
        return right / (self.num_tried + _ASSUMED_WEIGHT)


class DraftLengths:
    """Chooses how many guesses rows get. Deterministic: times are told."""

    def __init__(self) -> None:
        self.all_rows = Luck()
        # A pass of rows that get one token each, one that verifies, by its tokens; guessing, by the
        # guesses of the longest row.
        self.plain = PassTimes()
        self.verifying = PassTimes()
        self.guessing = PassTimes()

    def fade(self) -> None:
        """A turn without guesses: what is known of them is older."""
        for each in (self.all_rows, self.verifying, self.guessing):
            each.fade()

    def choose(self, luck: Sequence[Luck], most: Int32Array) -> Int32Array:
        """[K], at most `most` [K] each."""
        num_rows = len(luck)
        limit = min(int(most.max(initial=0)), MAX_GUESSES)
        none = np.zeros(num_rows, np.int32)
        if not limit or not self.plain.is_known:
            # So the first turn measures what guesses are to be compared with.
            return none
        verifying = self.verifying if self.verifying.is_known else self.plain
        of_all = self.all_rows.ratio(_ASSUMED_RATIO)
        ratios = np.array([each.ratio(of_all) for each in luck])
        best, best_rate = none, _LEAST_GAIN * num_rows / max(self.plain.of(num_rows), _LEAST_S)
        # [K, D]: what the guess at each depth brings, if it may be made.
        gains = ratios[:, None] ** np.arange(1, limit + 1)
        gains *= np.arange(limit) < most[:, None]
        # A guess that brings less than its own time is worth is none.
        gains[gains < best_rate * verifying.line[1]] = 0
        lengths = (gains > 0).sum(axis=1)
        for depth in range(1, limit + 1):
            chosen = np.minimum(lengths, depth)
            if chosen.max(initial=0) < depth:
                break
            tokens = num_rows + gains[:, :depth].sum()
            seconds = self.guessing.of(depth) + verifying.of(num_rows + chosen.sum())
            if tokens / max(seconds, _LEAST_S) > best_rate:
                best, best_rate = chosen.astype(np.int32), tokens / max(seconds, _LEAST_S)
        return best
