"""Drawing tokens by numbers that lie on the device: what is launched depends on none of them.

So a recording of a step can draw as well. Shape letters: S rows that are drawn, N rows of a
recording, V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from executor_service.steps.step import Int64Array
from splitserve_kernels.draw_rows import DrawRows


class StaticDraw(Protocol):
    """Chooses the same tokens as the Draw that it belongs to."""

    def num_words(self, num_rows: int) -> int:
        """How many int64 words say how so many rows are drawn."""
        ...

    def pack(self, rows: DrawRows, words: Int64Array) -> None:
        """Writes `rows` [S] into `words`, which have room for N; rows beyond are greedy.

        So are all rows where all words are 0.
        """
        ...

    def advance(self, words: Tensor, num_positions: Tensor) -> None:
        """Changes `words` on the device, so that rows are drawn so many positions further on.

        `num_positions`: [N] int64 there.
        """
        ...

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        """Draws from `logits` [N, V] float32 as `words` say, int64 on the same device.

        Returns [N] int32, -1 where no token can be told.
        """
        ...
