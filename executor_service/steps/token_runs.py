"""Tokens of rows that may have any number of them.

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
    """Those that rows sampled, or their drafts; the tokens of a row one after the other.

    `offsets`: [R + 1] int32, where those of each row are in `token_ids` int32.
    """

    offsets: _Int32s
    token_ids: _Int32s

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRuns:
        """The tokens of each row."""
        counts = np.array([len(tokens) for tokens in rows], np.int32)
        return _counted(counts, np.array(list(chain.from_iterable(rows)), np.int32))

    @classmethod
    def of_each(cls, token_ids: _Int32s) -> TokenRuns:
        """One token of each row, none where that is -1."""
        is_token = token_ids >= 0
        return _counted(is_token.astype(np.int32), token_ids[is_token])

    @property
    def counts(self) -> _Int32s:
        """[R]."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> list[list[int]]:
        """The tokens of each row."""
        tokens = self.token_ids.tolist()
        return [tokens[start:end] for start, end in pairwise(self.offsets.tolist())]

    def take(self, rows: _Int64s) -> TokenRuns:
        """Those of `rows`, rising indexes."""
        is_kept = np.zeros(len(self.offsets) - 1, np.bool_)
        is_kept[rows] = True
        counts = self.counts
        return _counted(counts[is_kept], self.token_ids[np.repeat(is_kept, counts)])

    def shortened(self, most: _Int32s) -> TokenRuns:
        """Those that come first, `most` [R] of each row."""
        counts = self.counts
        ranks = np.arange(len(self.token_ids)) - np.repeat(self.offsets[:-1], counts)
        kept = self.token_ids[ranks < np.repeat(most, counts)]
        return _counted(np.minimum(counts, most), kept)

    def without(self, rows: _Int64s) -> TokenRuns:
        """As if these rows had sampled nothing."""
        most = self.counts
        most[rows] = 0
        return self.shortened(most)

    def spread(self, rows: _Int64s, num_rows: int) -> TokenRuns:
        """These as the tokens of `rows` among so many; the others have none."""
        counts = np.zeros(num_rows, np.int32)
        counts[rows] = self.counts
        return _counted(counts, self.token_ids)


def _counted(counts: _Int32s, token_ids: _Int32s) -> TokenRuns:
    """`counts[i]` of the tokens are row i's."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return TokenRuns(offsets.astype(np.int32), token_ids)
