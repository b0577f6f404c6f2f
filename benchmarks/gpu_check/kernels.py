"""How long the kernels beside attention take, beside plain torch.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import median_s
from executor_service.device.kv_cache import copy_in_torch
from executor_service.sampling.sampler import SamplingRows, draw_unseen_in_torch
from executor_service.steps.sampling_params import ParamRows, SamplingParams
from splitserve_kernels.gpu.availability import why_unavailable

_NUM_COPIED = 16
_DRAWS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k and top-p": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    # So flat that whole rows are searched.
    "flat top-p": SamplingParams(temperature=100.0, top_p=0.99),
}


def measure_kernels(sizes: Sizes) -> Iterator[Measurement]:
    """Drawing tokens, and copying blocks."""
    draws, copies = {"torch": draw_unseen_in_torch}, {"torch": copy_in_torch}
    if why_unavailable() is None:
        from executor_service.backends.gpu_draw import triton_draw
        from splitserve_kernels.gpu.block_copy import copy_blocks

        draws["triton"], copies["triton"] = triton_draw, copy_blocks
    for batch in sizes.batches:
        logits = torch.randn(batch, sizes.vocab_size, device=sizes.device)
        for kind, params in _DRAWS.items():
            rows = _rows(batch, params)
            for name, draw in draws.items():
                time_s = median_s(partial(draw, logits, rows), sizes.device, sizes.num_runs)
                label = f"{name}, {batch} {kind} draws"
                yield Measurement("kernels", label, time_s * 1e6, "us")
    pool = torch.zeros(
        4 * _NUM_COPIED, 2**16 // sizes.divisor, dtype=torch.int64, device=sizes.device
    )
    sources = torch.arange(_NUM_COPIED, device=sizes.device) * 2
    for name, copy in copies.items():
        time_s = median_s(partial(copy, pool, sources, sources + 1), sizes.device, sizes.num_runs)
        label = f"{name}, {_NUM_COPIED} blocks of {8 * pool.shape[1]} bytes copied"
        yield Measurement("kernels", label, time_s * 1e6, "us")


def _rows(count: int, params: SamplingParams) -> SamplingRows:
    return SamplingRows(
        params=ParamRows.of([params] * count),
        seeds=np.arange(count, dtype=np.int64),
        positions=np.arange(count, dtype=np.int32),
        num_prompt_tokens=np.ones(count, np.int32),
        histories=[None] * count,
    )
