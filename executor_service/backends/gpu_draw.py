"""Draws tokens with the Triton kernel, beside plain torch.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_service.device.host_copies import to_device
from executor_service.sampling.sampler import SamplingRows, draw_in_torch, draw_random_rows
from executor_service.sampling.truncation import is_limited
from splitserve_kernels.gpu.sampling import greedy, sample


def triton_draw(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """Chooses as `draw_in_torch` does; rows cut by top-k, top-p or min-p stay with it."""
    params, device = rows.params, adjusted.device
    is_random = params.temperatures > 0
    if not is_random.any():
        return greedy(adjusted)[0]
    is_cut = is_random & is_limited(params, adjusted.shape[1])
    if is_cut.all():
        return draw_in_torch(adjusted, rows)
    token_ids, _ = sample(
        adjusted,
        # Those that are cut are greedy here, which costs the least.
        to_device(np.where(is_cut, np.float32(0), params.temperatures), device),
        to_device(rows.seeds.astype(np.int64), device),
        to_device(rows.positions.astype(np.int64), device),
    )
    if is_cut.any():
        cut = np.flatnonzero(is_cut)
        lines = to_device(cut, device)
        # A copy of their logits would be memory that the step it is measured with does not take.
        drawn = draw_random_rows(adjusted, adjusted.amax(dim=-1), rows, cut)
        token_ids[lines] = torch.where(token_ids[lines] >= 0, drawn, -1).to(torch.int32)
    return token_ids
