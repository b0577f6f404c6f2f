"""How long tokens take to be drawn, and what is done once for each layer, beside a copy's speed.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.steps import GREEDY, RANDOM, TOP_P
from benchmarks.gpu_check.timing import median_s
from executor_service.device import copy_in_torch
from executor_service.sampling import Draw, SamplingRows, draw_unseen_in_torch
from executor_service.steps import ParamRows, SamplingParams
from splitserve_kernels.gpu.launch import is_interpreted, why_unavailable

_NUM_COPIED = 16
_BATCHES = (1, 8, 32, 256)
_DRAWS = {
    "greedy": GREEDY,
    "random": RANDOM,
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k and top-p": TOP_P,
    # So flat that whole rows are searched.
    "flat top-p": SamplingParams(temperature=100.0, top_p=0.99),
}


def cases(sizes: Sizes) -> Iterator[Case]:
    """By Triton and in plain torch."""
    has_triton = why_unavailable() is None and not is_interpreted()
    draws: dict[str, Draw] = {"torch": draw_unseen_in_torch}
    copies = {"torch": copy_in_torch}
    if has_triton:
        from executor_service.backends.gpu_draw import triton_draw
        from splitserve_kernels.gpu.kv_write import copy_blocks

        draws["triton"], copies["triton"] = triton_draw, copy_blocks
    for batch in sizes.batches if sizes.is_smoke else _BATCHES:
        for kind, params in _DRAWS.items():
            for name, draw in draws.items():
                label = f"{name}, {batch} {kind} draws"
                yield Case(label, 3, partial(_draw, label, draw, _rows(batch, params), sizes))
    for name, copy in copies.items():
        label = f"{name}, {_NUM_COPIED} blocks copied"
        pool = torch.zeros(
            4 * _NUM_COPIED, 2**18 // sizes.divisor, dtype=torch.int64, device=sizes.device
        )
        sources = torch.arange(_NUM_COPIED, device=sizes.device) * 2
        num_bytes = 2 * _NUM_COPIED * pool[0].nbytes
        run = partial(copy, pool, sources, sources + 1)
        yield Case(label, 2, partial(_rate, label, run, num_bytes, sizes))
    if has_triton:
        yield from _layer_cases(sizes)


def _layer_cases(sizes: Sizes) -> Iterator[Case]:
    """Norms and gates of an 8B Llama's layers."""
    from splitserve_kernels.gpu.layer_ops import add_rms_norm, gated_product

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=sizes.device)

    for num_tokens in (1, 256, 2048, 8192):
        tokens, weight = numbers(num_tokens, 4096), numbers(4096)
        run = partial(add_rms_norm, tokens, tokens.clone(), weight, 1e-5)
        name = f"add and norm of {num_tokens} tokens"
        yield Case(name, 2, partial(_rate, name, run, 4 * tokens.nbytes, sizes))
        gate_up = numbers(num_tokens, 2 * 14336)
        name = f"gated product of {num_tokens} tokens"
        gate = partial(gated_product, gate_up)
        yield Case(name, 2, partial(_rate, name, gate, 3 * gate_up.nbytes // 2, sizes))


def _rate(
    name: str, run: Callable[[], object], num_bytes: int, sizes: Sizes
) -> Iterator[Measurement]:
    seconds = median_s(run, sizes.device, sizes.num_runs)
    share = num_bytes / seconds / rates_of(sizes).bandwidth
    yield Measurement(name, seconds * 1e6, "us", note=f"{share:.0%} of a copy's bandwidth")


def _draw(name: str, draw: Draw, rows: SamplingRows, sizes: Sizes) -> Iterator[Measurement]:
    logits = torch.randn(len(rows.seeds), sizes.vocab_size, device=sizes.device) * 3
    seconds = median_s(partial(draw, logits, rows), sizes.device, sizes.num_runs)
    least = logits.nbytes / rates_of(sizes).bandwidth
    note = f"to read the logits once takes {least * 1e6:.1f}"
    yield Measurement(name, seconds * 1e6, "us", note=note)


def _rows(count: int, params: SamplingParams) -> SamplingRows:
    return SamplingRows(
        params=ParamRows.of([params] * count),
        seeds=np.arange(count, dtype=np.int64),
        positions=np.arange(count, dtype=np.int32),
        num_prompt_tokens=np.ones(count, np.int32),
        histories=[None] * count,
    )
