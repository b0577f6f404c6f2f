"""Draws tokens with Triton's kernels.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from executor_service.device.host_copies import to_device
from executor_service.sampling.sampler import SamplingRows, draw_rows
from executor_service.steps.step import Int64Array
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.gpu.sampling.columns import DrawColumns, num_words, pack
from splitserve_kernels.gpu.sampling.draw import draw, greedy


def triton_draw(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """Chooses as `draw_in_torch` does, and waits for nothing that the device is to find."""
    vocab_size = adjusted.shape[1]
    of_kernel = draw_rows(rows, vocab_size)
    if not of_kernel.is_random:
        return greedy(adjusted)
    words = np.empty(num_words(len(of_kernel)), np.int64)
    pack(of_kernel, words)
    columns = DrawColumns.of_words(to_device(words, adjusted.device))
    return draw(adjusted, columns, may_cut=of_kernel.is_searched(vocab_size))


class TritonStaticDraw:
    """The StaticDraw of `triton_draw`. Rows that need no cut leave the kernels that cut at once."""

    def num_words(self, num_rows: int) -> int:
        return num_words(num_rows)

    def pack(self, rows: DrawRows, words: Int64Array) -> None:
        pack(rows, words)

    def advance(self, words: Tensor, num_positions: Tensor) -> None:
        DrawColumns.of_words(words).positions[: len(num_positions)].add_(num_positions)

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        return draw(logits, DrawColumns.of_words(words))
