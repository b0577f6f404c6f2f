"""What beside attention is checked: writes, moves and sampling, against plain torch.

Moves and writes have to be exact; a drawn token must be where the float64 distribution puts it.

Shape letters: S rows that sample, V tokens of the vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_check.problems import (
    MIXED_ROWS,
    AttentionProblem,
    AttentionShape,
    largest,
    make_problem,
)
from benchmarks.gpu_check.sizes import Sizes
from executor_service.trials import DRAW_TOLERANCE, try_draw
from splitserve_kernels import reference

# Turned heads are rounded once, to 8 bits, and are below 8.
_ROTARY_TOLERANCE = 2**-5
# Relative: what was rounded to 8 bits is rounded once more, or twice.
_ELEMENTWISE_TOLERANCE = 2**-6


def operations(sizes: Sizes) -> dict[str, tuple[Callable[[], float], float]]:
    """By name: what measures the error of the Triton kernel, and the largest that is allowed."""
    return {
        "kv_write": (partial(_write_error, sizes), 0.0),
        "rotary_kv_write": (partial(_rotary_error, sizes), _ROTARY_TOLERANCE),
        "add_rms_norm": (partial(_norm_error, sizes), _ELEMENTWISE_TOLERANCE),
        "gated_product": (partial(_gate_error, sizes), _ELEMENTWISE_TOLERANCE),
        "copy of blocks": (partial(_copy_error, sizes), 0.0),
        "greedy": (partial(_greedy_error, sizes), 0.0),
        "draw of rows of all kinds": (partial(_draw_error, sizes), DRAW_TOLERANCE),
    }


def _write_problem(sizes: Sizes) -> AttentionProblem:
    shape = AttentionShape(32, 8, 128, 128, 16, MIXED_ROWS).divided(sizes.divisor)
    return make_problem(shape, 1, torch.bfloat16, sizes.device)


def _write_error(sizes: Sizes) -> float:
    from splitserve_kernels.gpu.kv_write import kv_write
    from splitserve_kernels.gpu.launch import LayerPools

    pools = []
    for is_reference in (True, False):
        problem = _write_problem(sizes)
        key_pool, value_pool = problem.cache.key_pools[0], problem.cache.value_pools[0]
        if is_reference:
            reference.write_kv(problem.key, problem.value, key_pool, value_pool, problem.batch)
        else:
            slots = problem.batch.slot_mapping
            kv_write(problem.key, problem.value, LayerPools(key_pool, value_pool), slots)
        pools.append((key_pool, value_pool))
    return largest(*(a.float() - b.float() for a, b in zip(*pools, strict=True)))


def _rotary_error(sizes: Sizes) -> float:
    from splitserve_kernels.gpu.kv_write import rotary_kv_write
    from splitserve_kernels.gpu.launch import LayerPools, RotaryTables

    problem = _write_problem(sizes)
    slots, device = problem.batch.slot_mapping, sizes.device
    pools = LayerPools(problem.cache.key_pools[0], problem.cache.value_pools[0])
    frequencies = torch.linspace(0.01, 1, 64, device=device)
    angles = torch.arange(len(slots), device=device)[:, None] * frequencies
    tables = RotaryTables(angles.cos(), angles.sin())
    heads = (problem.query, problem.key, problem.value)
    queries = rotary_kv_write(heads, tables, pools, slots).double()
    places = (slots // pools.block_size, slots % pools.block_size)
    return largest(
        queries - _turned(problem.query, angles),
        pools.key[places].double() - _turned(problem.key, angles),
        pools.value[places] - problem.value,
    )


def _turned(heads: Tensor, angles: Tensor) -> Tensor:
    """`heads`: [T, .., 128] as complex numbers of two halves, turned by `angles` [T, 64]."""
    x, y = heads.double().chunk(2, dim=-1)
    turned = torch.complex(x, y) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def _norm_error(sizes: Sizes) -> float:
    """Relative, of the sum and of what is normalised; of tokens as wide as an 8B Llama's."""
    from splitserve_kernels.gpu.layer_ops import add_rms_norm

    width = max(16, 4096 // sizes.divisor)
    numbers, addend, weight = (_random((33, width), seed, sizes) for seed in range(3))
    total, normed = add_rms_norm(numbers, addend, weight[0], 1e-5)
    x = total.double()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5)
    return max(
        _relative(total, numbers.double() + addend.double()),
        _relative(normed, x * scale * weight[0].double()),
    )


def _gate_error(sizes: Sizes) -> float:
    """Relative."""
    from splitserve_kernels.gpu.layer_ops import gated_product

    gate_up = _random((33, 2 * max(16, 14336 // sizes.divisor)), 3, sizes)
    gate, up = gate_up.double().chunk(2, dim=-1)
    return _relative(gated_product(gate_up), torch.nn.functional.silu(gate) * up)


def _random(shape: tuple[int, int], seed: int, sizes: Sizes) -> Tensor:
    generator = torch.Generator(sizes.device).manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device=sizes.device)
    return numbers.to(torch.bfloat16)


def _relative(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a number, relative to it."""
    return float(((actual.double() - expected).abs() / expected.abs().clamp(min=1e-30)).max())


def _copy_error(sizes: Sizes) -> float:
    """The largest difference after blocks went from sources to targets."""
    from splitserve_kernels.gpu.kv_write import copy_blocks

    width, count = 2**17 // sizes.divisor, 64
    generator = torch.Generator(sizes.device).manual_seed(0)
    pool = torch.randn(4 * count, width, generator=generator, device=sizes.device)
    order = torch.randperm(4 * count, generator=torch.Generator().manual_seed(0)).to(sizes.device)
    sources, targets = order[:count], order[count : 2 * count]
    expected = pool.clone()
    expected[targets] = pool[sources]
    copy_blocks(pool, sources, targets)
    return largest(pool - expected)


def _logits(sizes: Sizes) -> Tensor:
    """[S, V]."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    shape = (max(sizes.batches), sizes.vocab_size)
    return torch.randn(shape, generator=generator, device=sizes.device) * 3


def _greedy_error(sizes: Sizes) -> float:
    from splitserve_kernels.gpu.sampling.draw import greedy

    logits = _logits(sizes)
    return largest(greedy(logits).long() - logits.argmax(dim=-1))


def _draw_error(sizes: Sizes) -> float:
    """See `try_draw`, which raises for what is not a matter of rounding."""
    from executor_service.backends.gpu_draw import triton_draw

    return try_draw(triton_draw, sizes.vocab_size, sizes.device)
