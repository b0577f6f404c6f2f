"""Sampling parameters on the device, copied as a whole.

Shape letters: S rows that sample, N capacity in rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve_kernels.draw_rows import DrawRows

# 64-bit words per row.
_NUM_WORDS = 5
# Columns start at addresses aligned for loads of any width: Triton compiles a kernel again for
# unaligned ones.
_ALIGNED_ROWS = 4


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """Columns of `DrawRows` on the device of the logits, [S] or more each."""

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    @classmethod
    def of_words(cls, words: Tensor) -> DrawColumns:
        """Returns views of `words` [5 N] int64, filled by `pack`, as columns of [N] each."""
        num_rows = len(words) // _NUM_WORDS
        seeds, positions, top_p, floats, integers = words.view(_NUM_WORDS, num_rows)
        temperatures, min_p = floats.view(torch.float32).split(num_rows)
        top_k, _ = integers.view(torch.int32).split(num_rows)
        return cls(temperatures, top_k, top_p.view(torch.float64), min_p, seeds, positions)


def num_words(num_rows: int) -> int:
    """Returns the number of words that `pack` needs for `num_rows` rows: 5 N."""
    return _NUM_WORDS * (num_rows // _ALIGNED_ROWS + 1) * _ALIGNED_ROWS


def pack(rows: DrawRows, words: npt.NDArray[np.int64]) -> None:
    """Writes `rows` into `words` [5 N] int64, N >= S; further rows are greedy."""
    words[:] = 0
    seeds, positions, top_p, floats, integers = words.reshape(_NUM_WORDS, -1)
    count, room = len(rows), len(seeds)
    seeds[:count] = rows.seeds
    positions[:count] = rows.positions
    top_p.view(np.float64)[:count] = rows.top_p
    floats.view(np.float32)[:count] = rows.temperatures
    floats.view(np.float32)[room : room + count] = rows.min_p
    integers.view(np.int32)[:count] = rows.top_k
