"""What a CPU can do, as far as plain torch gets it to, and what the parts of a step ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Far more than any cache holds.
_READ_BYTES = 2**29
_MATRIX_SIZE = 2048
_NUM_RUNS = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """What has to be read from memory, and computed."""

    num_bytes: float
    num_flops: float


@dataclass(frozen=True, slots=True)
class CpuLimits:
    """Memory bandwidth, and the rate of matrix products."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, cost: Cost) -> float:
        """The least time that `cost` can take."""
        return max(cost.num_bytes / self.bytes_per_s, cost.num_flops / self.flops_per_s)


def measure_limits(dtype: torch.dtype) -> CpuLimits:
    """The best of a few runs: the sum of a large tensor, and a product of matrices of `dtype`."""
    numbers = torch.ones(_READ_BYTES // 4)
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype)
    read_s = _best_s(lambda: numbers.sum())
    product_s = _best_s(lambda: torch.nn.functional.linear(matrix, matrix))
    return CpuLimits(_READ_BYTES / read_s, 2 * _MATRIX_SIZE**3 / product_s)


def _best_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_NUM_RUNS):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return min(times)


@dataclass(frozen=True, slots=True)
class StepSize:
    """`num_rows` rows that bring `num_new` tokens each, behind `num_computed`, and all sample."""

    num_rows: int
    num_new: int
    num_computed: int


def part_costs(
    config: Any,  # noqa: ANN401
    size: StepSize,
    weight_bytes: float,
    kv_bytes: float,
) -> dict[str, Cost]:
    """Costs of those STEP_PARTS that have some worth counting. Every layer attends to all tokens.

    `config`: of `transformers`, text part. `weight_bytes`, `kv_bytes`: of one number.
    """
    num_heads, num_layers = config.num_attention_heads, config.num_hidden_layers
    num_kv_heads = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    width, mlp_width = config.hidden_size, config.intermediate_size
    num_tokens = size.num_rows * size.num_new

    def matrix(num_outputs: int, num_inputs: int, num_rows: int, count: int) -> Cost:
        num_weights = count * num_outputs * num_inputs
        return Cost(num_weights * weight_bytes, 2 * num_weights * num_rows)

    num_read = size.num_rows * (size.num_computed + size.num_new)
    num_pairs = num_tokens * (size.num_computed + (size.num_new + 1) / 2)
    return {
        "qkv": matrix((num_heads + 2 * num_kv_heads) * head_dim, width, num_tokens, num_layers),
        "attention": Cost(
            num_layers * 2 * num_kv_heads * head_dim * num_read * kv_bytes,
            num_layers * 4 * num_heads * head_dim * num_pairs,
        ),
        "attention_output": matrix(width, num_heads * head_dim, num_tokens, num_layers),
        "gate_up": matrix(2 * mlp_width, width, num_tokens, num_layers),
        "down": matrix(width, mlp_width, num_tokens, num_layers),
        "head": matrix(config.vocab_size, width, size.num_rows, 1),
    }
