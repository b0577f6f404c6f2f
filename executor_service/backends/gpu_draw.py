"""Sampling with Triton kernels: adjusts logits in one launch, and draws tokens.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_service.device import IntegerArrays, Uploads, to_device
from executor_service.sampling import IN_PROMPT, LogitColumns, SamplingRows, draw_rows
from executor_service.steps import Int64Array
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.gpu.sampling.adjust import AdjustColumns, adjust
from splitserve_kernels.gpu.sampling.draw import DrawColumns, draw, greedy, num_words, pack


def triton_adjust(logits: Tensor, rows: SamplingRows, uploads: Uploads) -> Tensor:
    """Adjusts logits with the same bits as `adjust_in_torch`."""
    columns = LogitColumns.of(rows, logits.shape[1])
    if columns is None:
        return logits
    numbers = [
        columns.mask_lines,
        columns.mask_words,
        columns.bias_starts,
        columns.biased_tokens,
        columns.count_lines,
        columns.biases.view("int32"),
        columns.penalties.view("int32"),
    ]
    _, (mask_lines, mask_words, bias_starts, biased_tokens, count_lines, *floats) = uploads.send(
        IntegerArrays([], numbers)
    )
    biases, penalties = (tensor.view(torch.float32) for tensor in floats)
    return adjust(
        logits,
        AdjustColumns(
            mask_lines=mask_lines,
            mask_words=mask_words,
            bias_starts=bias_starts,
            biased_tokens=biased_tokens,
            biases=biases,
            count_lines=count_lines,
            # A placeholder if no row counts tokens.
            counts=count_lines if rows.counted is None else rows.counted.table,
            penalties=penalties,
            output_bits=IN_PROMPT - 1,
        ),
    )


def triton_draw(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """Chooses tokens as `draw_in_torch` does, without waiting for the device."""
    vocab_size = adjusted.shape[1]
    of_kernel = draw_rows(rows, vocab_size)
    if not of_kernel.is_random:
        return greedy(adjusted)
    words = np.empty(num_words(len(of_kernel)), np.int64)
    pack(of_kernel, words)
    columns = DrawColumns.of_words(to_device(words, adjusted.device))
    return draw(adjusted, columns, may_cut=of_kernel.is_searched(vocab_size))


class TritonStaticDraw:
    """StaticDraw of `triton_draw`. Rows that need no cut leave the kernels that cut at once."""

    def num_words(self, num_rows: int) -> int:
        return num_words(num_rows)

    def pack(self, rows: DrawRows, words: Int64Array) -> None:
        pack(rows, words)

    def advance(self, words: Tensor, num_positions: Tensor) -> None:
        DrawColumns.of_words(words).positions[: len(num_positions)].add_(num_positions)

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        return draw(logits, DrawColumns.of_words(words))
