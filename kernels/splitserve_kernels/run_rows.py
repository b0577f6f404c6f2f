"""How far the rows of a decode run on, as columns.

Shape letters: R rows, M blocks of the longest block table.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve_kernels.draw_rows import DrawRows


@dataclass(frozen=True, slots=True)
class RunInput:
    """What the rows begin with, on the host. All contiguous.

    `token_ids`: [R] int64, one input token each. `num_computed_tokens`: [R] int32, so many stand
    before it. `block_tables`: [R, M] int32, with the slots of all tokens that are written; padded
    with any value.
    """

    token_ids: npt.NDArray[np.int64]
    num_computed_tokens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RunRows:
    """Rows that get token after token, each of which is the next input of its row.

    `draws`: R of them, how each token is chosen; `draws.positions` are those of the first ones, and
    each that follows is one further. `num_tokens`: [R] int32, so many at most, 1 or more.
    `stop_offsets`: [R + 1] int32, where the tokens that end each row are in `stop_token_ids` int32.
    """

    draws: DrawRows
    num_tokens: npt.NDArray[np.int32]
    stop_offsets: npt.NDArray[np.int32]
    stop_token_ids: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        draws: DrawRows,
        num_tokens: npt.NDArray[np.int32],
        stop_token_ids: Sequence[Collection[int]],
    ) -> RunRows:
        """`stop_token_ids`: R collections."""
        ends = itertools.accumulate(map(len, stop_token_ids), initial=0)
        return cls(
            draws,
            np.ascontiguousarray(num_tokens, np.int32),
            np.fromiter(ends, np.int32, len(stop_token_ids) + 1),
            np.array(list(itertools.chain.from_iterable(stop_token_ids)), np.int32),
        )

    def __len__(self) -> int:
        """R."""
        return len(self.num_tokens)

    @property
    def max_num_tokens(self) -> int:
        """Of the row that may get most."""
        return int(self.num_tokens.max())
