"""Token lists of rows, each of any length, in two arrays.

Shape letters: R rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Tokens that rows sampled, or draft tokens, concatenated row by row.

    `offsets`: [R + 1] int32, the bounds of each row in `token_ids` int32.
    """

    offsets: _Int32s
    token_ids: _Int32s

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRuns:
        """Builds runs from the token list of each row."""
        counts = np.array([len(tokens) for tokens in rows], np.int32)
        return _counted(counts, np.array(list(chain.from_iterable(rows)), np.int32))

    @classmethod
    def of_each(cls, token_ids: _Int32s) -> TokenRuns:
        """Builds runs of one token per row, and of none where the token is -1."""
        is_token = token_ids >= 0
        return _counted(is_token.astype(np.int32), token_ids[is_token])

    @property
    def counts(self) -> _Int32s:
        """Number of tokens of each row, [R]."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> list[list[int]]:
        """Token list of each row."""
        tokens = self.token_ids.tolist()
        return [tokens[start:end] for start, end in pairwise(self.offsets.tolist())]

    def take(self, rows: _Int64s) -> TokenRuns:
        """Returns the runs of `rows`, given as rising indexes."""
        is_kept = np.zeros(len(self.offsets) - 1, np.bool_)
        is_kept[rows] = True
        counts = self.counts
        return _counted(counts[is_kept], self.token_ids[np.repeat(is_kept, counts)])

    def shortened(self, most: _Int32s) -> TokenRuns:
        """Returns the first `most` [R] tokens of each row."""
        counts = self.counts
        ranks = np.arange(len(self.token_ids)) - np.repeat(self.offsets[:-1], counts)
        kept = self.token_ids[ranks < np.repeat(most, counts)]
        return _counted(np.minimum(counts, most), kept)

    def behind(self, num_first: _Int32s) -> TokenRuns:
        """Returns the runs without the first `num_first` [R] tokens of each row, which it has."""
        counts = self.counts
        ranks = np.arange(len(self.token_ids)) - np.repeat(self.offsets[:-1], counts)
        kept = self.token_ids[ranks >= np.repeat(num_first, counts)]
        return _counted(counts - num_first, kept)

    def without(self, rows: _Int64s) -> TokenRuns:
        """Returns the runs with no tokens for `rows`."""
        most = self.counts
        most[rows] = 0
        return self.shortened(most)

    def spread(self, rows: _Int64s, num_rows: int) -> TokenRuns:
        """Returns runs of `num_rows` rows: `rows` have these tokens, other rows have none."""
        counts = np.zeros(num_rows, np.int32)
        counts[rows] = self.counts
        return _counted(counts, self.token_ids)


def _counted(counts: _Int32s, token_ids: _Int32s) -> TokenRuns:
    """Builds runs in which row i has `counts[i]` of the concatenated tokens."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return TokenRuns(offsets.astype(np.int32), token_ids)
