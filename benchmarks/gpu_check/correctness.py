"""Every kernel at the size of real models against plain torch on the same device.

Attention is compared with `reference` on the same numbers as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_check.backends import present_backends, why_not
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.operations import operations
from benchmarks.gpu_check.problems import (
    MIXED_ROWS,
    AttentionProblem,
    AttentionShape,
    largest,
    make_problem,
)
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Rows, Sizes
from executor_service.backends import DEFAULT_BLOCK_SIZE, Candidate
from executor_service.device import LayerShape
from splitserve_kernels import reference
from splitserve_kernels.gpu.launch import why_unavailable
from splitserve_kernels.paged_batch import AttentionOptions, KVScales

# Largest difference of an output: those of tests/kernels/gpu.
_TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Their tokens make fewer programs than a device has room for.
_FEW_TOKENS = ((40_000, 20), (8191, 3), (64, 1), (0, 40))
_DECODES = ((0, 1), (63, 1), (64, 1), (1000, 1), (8191, 1), (40_000, 1))


@dataclass(frozen=True, slots=True)
class TriedLayer:
    """One kind of layer. `shape.rows` are set by the check."""

    name: str
    shape: AttentionShape
    options: AttentionOptions
    dtype: torch.dtype = torch.bfloat16

    @property
    def layer(self) -> LayerShape:
        """What the layer stores of a token."""
        return LayerShape(self.shape.num_kv_heads, self.shape.key_dim, self.shape.value_dim)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Attention by all backends, then writes, moves and sampling."""
    for candidate in present_backends():
        for layer in _layers(sizes):
            dtype = layer.dtype
            is_refused = why_not(candidate, layer.layer, layer.options, dtype, dtype) is not None
            # What is refused for its window alone was wrong on one card; others may differ.
            without = replace(layer.options, sliding_window=None)
            if is_refused and why_not(candidate, layer.layer, without, dtype, dtype) is not None:
                continue
            for rows_name, rows in _rows(sizes):
                tried = replace(layer.shape, rows=rows, block_size=candidate.block_size)
                name = f"{candidate.name} {rows_name}, {layer.name}"
                compare = partial(
                    _attention_error, candidate, layer, tried.divided(sizes.divisor), sizes
                )
                if is_refused:
                    yield Case(f"{name}, refused", 5, partial(_seen, f"{name}, refused", compare))
                else:
                    yield _case(name, compare, _TOLERANCES[layer.dtype])
    if why_unavailable() is not None:
        return
    for name, rows in _rows(sizes):
        shape = AttentionShape(32, 8, 128, 128, DEFAULT_BLOCK_SIZE, rows).divided(sizes.divisor)
        error = partial(_float8_error, shape, sizes)
        yield _case(f"triton {name}, float8 pools", error, _TOLERANCES[torch.bfloat16])
    for operation, (measure, tolerance) in operations(sizes).items():
        yield _case(operation, measure, tolerance)


def _rows(sizes: Sizes) -> Sequence[tuple[str, Rows]]:
    """In a smoke test the one that has both: it is interpreted."""
    kinds = (("mixed", MIXED_ROWS), ("decode", _DECODES), ("few tokens", _FEW_TOKENS))
    return kinds[:1] if sizes.is_smoke else kinds


def _case(name: str, measure: Callable[[], float], tolerance: float) -> Case:
    return Case(name, 5, partial(_verdict, name, measure, tolerance))


def _seen(name: str, measure: Callable[[], float]) -> Iterator[Measurement]:
    yield Measurement(name, measure(), "error")


def _verdict(name: str, measure: Callable[[], float], tolerance: float) -> Iterator[Measurement]:
    error = measure()
    yield Measurement(name, error, "error", f"at most {tolerance:g}", error <= tolerance)


def _layers(sizes: Sizes) -> list[TriedLayer]:
    def shape(num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int) -> AttentionShape:
        return AttentionShape(num_heads, num_kv_heads, key_dim, value_dim, DEFAULT_BLOCK_SIZE, ())

    llama, gemma, gpt_oss = shape(32, 8, 128, 128), shape(16, 8, 256, 256), shape(64, 8, 64, 64)
    sinks = torch.linspace(-2, 4, gpt_oss.num_heads, device=sizes.device)
    window = max(2, 1000 // sizes.divisor)
    plain = AttentionOptions(scale=128**-0.5)
    layers = [
        TriedLayer("32/8 heads of 128", llama, plain),
        TriedLayer("32/8 heads of 128, float16", llama, plain, torch.float16),
        TriedLayer("32/8 heads of 128, float32", llama, plain, torch.float32),
        TriedLayer("window", llama, replace(plain, sliding_window=window)),
        TriedLayer(
            "16/8 heads of 256, softcap",
            gemma,
            AttentionOptions(scale=256**-0.5, sliding_window=window, softcap=50.0),
        ),
        TriedLayer(
            "64/8 heads of 64, sinks",
            gpt_oss,
            AttentionOptions(scale=0.125, sliding_window=window, sinks=sinks),
        ),
        TriedLayer("keys of 192, values of 128", shape(16, 16, 192, 128), plain),
        TriedLayer("71/1 heads of 64", shape(71, 1, 64, 64), AttentionOptions(scale=0.125)),
        TriedLayer("heads of 80", shape(32, 32, 80, 80), AttentionOptions(scale=80**-0.5)),
    ]
    return layers if sizes.divisor == 1 else layers[:1]


def _attention_error(
    candidate: Candidate, layer: TriedLayer, shape: AttentionShape, sizes: Sizes
) -> float:
    """Largest difference of an output after a write."""
    backend = candidate.make()
    problem = make_problem(shape, 1, layer.dtype, sizes.device)
    pools = [problem.cache.key_pools[0], problem.cache.value_pools[0]]
    backend.write_kv(problem.key, problem.value, pools[0], pools[1], problem.batch)
    actual = backend.paged_attention(
        problem.query, pools[0], pools[1], problem.batch, layer.options
    )
    return largest(actual.float() - _expected(problem, pools, layer.options))


def _expected(problem: AttentionProblem, pools: list[Tensor], options: AttentionOptions) -> Tensor:
    wide = [pool.float() for pool in pools]
    return reference.paged_attention(
        problem.query.float(), wide[0], wide[1], problem.batch, options
    )


def _float8_error(shape: AttentionShape, sizes: Sizes) -> float:
    from splitserve_kernels.gpu.attention import backend

    options, scales = AttentionOptions(scale=128**-0.5), KVScales(key=0.02, value=0.01)
    problem = make_problem(shape, 1, torch.bfloat16, sizes.device)
    narrow = [
        (pool / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        for pool, scale in (
            (problem.cache.key_pools[0], scales.key),
            (problem.cache.value_pools[0], scales.value),
        )
    ]
    actual = backend.paged_attention(
        problem.query, narrow[0], narrow[1], problem.batch, options, scales
    )
    wide = [narrow[0].float() * scales.key, narrow[1].float() * scales.value]
    return largest(actual.float() - _expected(problem, wide, options))
