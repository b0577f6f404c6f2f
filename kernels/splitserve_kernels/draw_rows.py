"""Sampling parameters of each row, as columns.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Columns of sampling parameters, all [S] and contiguous.

    Meanings: `SamplingParams` in `executor.proto`. `temperatures`: float32, 0 for the largest
    logit. `top_k`: int32, V or more for no limit. `top_p`: float64, 1 for no limit. `min_p`:
    float32, 0 for no limit. `seeds`, `positions`: int64, which determine the random number.
    """

    temperatures: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

    @classmethod
    def greedy(cls, num_rows: int, vocab_size: int) -> DrawRows:
        """Returns rows that take the largest logit, without any limit, seed and position 0."""
        return cls(
            temperatures=np.zeros(num_rows, np.float32),
            top_k=np.full(num_rows, vocab_size, np.int32),
            top_p=np.ones(num_rows),
            min_p=np.zeros(num_rows, np.float32),
            seeds=np.zeros(num_rows, np.int64),
            positions=np.zeros(num_rows, np.int64),
        )

    def __len__(self) -> int:
        """Returns S, the number of rows."""
        return len(self.seeds)

    @property
    def is_random(self) -> bool:
        """Whether any row is sampled at a temperature."""
        return bool((self.temperatures > 0).any())

    def is_searched(self, vocab_size: int) -> bool:
        """Returns whether top-k or top-p limit any sampled row, so that all its tokens matter."""
        is_limited = (self.top_k < vocab_size) | (self.top_p < 1)
        return bool((is_limited & (self.temperatures > 0)).any())


# Names of the columns, in the order of the structure that native code reads.
COLUMN_NAMES = tuple(column.name for column in fields(DrawRows))
# Limits on the tokens of a row whose columns have the values of the request.
FURTHER_LIMITS = tuple(
    name for name in COLUMN_NAMES if name not in ("temperatures", "top_k", "seeds", "positions")
)
