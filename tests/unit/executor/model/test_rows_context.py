"""Attention of rows side by side, against each row alone in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from executor_service.model import RowsContext
from splitserve_kernels.paged_batch import AttentionOptions

# Groups of short rows, of rows of one length, and of rows that only attend together with padding.
LENGTHS = (1, 3, 3, 20, 65, 65, 65, 90, 100, 300)
NUM_HEADS, NUM_KV_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 6


def expected(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, *, is_causal: bool
) -> Tensor:
    """Attention of one row, [L, H, E], in float64."""
    heads = query.double().transpose(0, 1)
    keys, values = (
        each.double().transpose(0, 1).repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0)
        for each in (key, value)
    )
    positions = torch.arange(len(query))
    distance = positions[:, None] - positions
    seen = distance.abs() < (window or len(query))
    if is_causal:
        seen &= distance >= 0
    scores = (heads @ keys.transpose(1, 2) * SIZE**-0.5).masked_fill(~seen, -torch.inf)
    attended: Tensor = scores.softmax(dim=-1) @ values
    return attended.transpose(0, 1)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 7, 150])
def test_rows_attend_to_their_own_tokens(pads: bool, is_causal: bool, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    context = RowsContext(is_causal=is_causal, pads=pads)
    context.begin_forward(LENGTHS, torch.device("cpu"))
    query, key, value = (
        torch.randn(sum(LENGTHS), num_heads, size, generator=generator)
        for num_heads, size in (
            (NUM_HEADS, SIZE),
            (NUM_KV_HEADS, SIZE),
            (NUM_KV_HEADS, VALUE_SIZE),
        )
    )
    options = AttentionOptions(scale=SIZE**-0.5, sliding_window=window)
    found = context.attend(nn.Identity(), query, key, value, options)
    queries, keys, values = (torch.split(each, list(LENGTHS)) for each in (query, key, value))
    right = torch.cat(
        [
            expected(*row, window, is_causal=is_causal)
            for row in zip(queries, keys, values, strict=True)
        ]
    )
    torch.testing.assert_close(found, right.float(), atol=1e-5, rtol=0)
