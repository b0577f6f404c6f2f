"""A StaticDraw of plain torch operations that depend on shapes only, by sorting whole rows.

Shape letters: N rows that there is room for, V tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_service.sampling.sampler import uniform
from executor_service.steps.step import Int64Array
from splitserve_kernels.draw_rows import DrawRows

_NUM_COLUMNS = 6


class SortingDraw:
    """`num_drawn`: how often it was asked on the host."""

    num_drawn = 0

    def num_words(self, num_rows: int) -> int:
        return _NUM_COLUMNS * num_rows

    def pack(self, rows: DrawRows, words: Int64Array) -> None:
        columns = words.reshape(_NUM_COLUMNS, -1)
        columns[:] = 0
        columns[0, : len(rows)] = rows.seeds
        columns[1, : len(rows)] = rows.positions
        columns[2, : len(rows)] = rows.top_k
        for index, numbers in ((3, rows.temperatures), (4, rows.top_p), (5, rows.min_p)):
            columns[index].view(np.float64)[: len(rows)] = numbers

    def advance(self, words: Tensor, num_positions: Tensor) -> None:
        words.view(_NUM_COLUMNS, -1)[1].add_(num_positions)

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        self.num_drawn += 1
        vocab_size = logits.shape[1]
        seeds, positions, top_k, *floats = words.view(_NUM_COLUMNS, -1)
        temperature, top_p, min_p = (column.view(torch.float64)[:, None] for column in floats)
        largest, first = logits.max(dim=-1)
        is_greedy = temperature[:, 0] == 0
        divisor = torch.where(temperature == 0, 1.0, temperature).float()
        falling = ((logits - largest[:, None]) / divisor).sort(dim=-1, descending=True, stable=True)
        weights = torch.exp(falling.values)
        ranks = torch.arange(vocab_size)[None, :]
        least = falling.values.gather(-1, (top_k.clamp(1, vocab_size) - 1)[:, None])
        stays = (falling.values >= least) & (weights >= min_p.float())
        eligible = torch.where(falling.values >= least, weights, 0.0).double()
        before = eligible.cumsum(dim=-1) - eligible
        total = eligible.sum(dim=-1, keepdim=True)
        stays &= (before < top_p * total) | (top_p >= 1)
        kept = torch.where(stays | (ranks == 0), weights, 0.0)
        by_id = torch.zeros_like(kept).scatter(-1, falling.indices, kept).double()
        running = by_id.cumsum(dim=-1)
        target = uniform(seeds, positions)[:, None] * running[:, -1:]
        drawn = (running <= target).sum(dim=-1).clamp(max=vocab_size - 1)
        token_ids = torch.where(is_greedy, first, drawn)
        return torch.where(torch.isfinite(largest), token_ids, -1).to(torch.int32)
