"""The tokens of a step whose rows may get several.

Shape letters: R rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledRuns:
    """All tokens that rows sampled, those of a row after the other.

    `offsets`: [R + 1] int32, where those of each row are in `token_ids` int32.
    """

    offsets: _Int32s
    token_ids: _Int32s

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> SampledRuns:
        """The tokens of each row."""
        counts = np.array([len(tokens) for tokens in rows], np.int32)
        return _counted(counts, np.array(list(chain.from_iterable(rows)), np.int32))

    @property
    def counts(self) -> _Int32s:
        """[R]."""
        return np.diff(self.offsets)

    def without(self, rows: _Int64s) -> SampledRuns:
        """As if these rows had sampled nothing."""
        is_kept = np.ones(len(self.offsets) - 1, np.bool_)
        is_kept[rows] = False
        counts = self.counts
        return _counted(counts * is_kept, self.token_ids[np.repeat(is_kept, counts)])

    def spread(self, rows: _Int64s, num_rows: int) -> SampledRuns:
        """These as the tokens of `rows` among so many; the others have none."""
        counts = np.zeros(num_rows, np.int32)
        counts[rows] = self.counts
        return _counted(counts, self.token_ids)


def _counted(counts: _Int32s, token_ids: _Int32s) -> SampledRuns:
    """`counts[i]` of the tokens are row i's."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return SampledRuns(offsets.astype(np.int32), token_ids)
