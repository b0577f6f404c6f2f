"""Requirements of a launch: available kernels, integer arithmetic, pools and rotations of a layer.

Imports no Triton: call `why_unavailable()` before importing a module that needs it. The integer
functions replace Triton's own, which take microseconds each on the host.

Shape letters: N blocks of the pool, B block size, G key/value heads, D size of a key head, E size
of a value head, T tokens over all rows, R rotated dimensions.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve_kernels.paged_batch import UNIT_SCALES, KVScales


def why_unavailable() -> str | None:
    """Returns why the kernels cannot run; None if they can.

    Without a CUDA device they run in Triton's interpreter, if TRITON_INTERPRET=1 was set before
    Triton was first imported.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() or is_interpreted():
        return None
    return "there is no CUDA device, and TRITON_INTERPRET=1 is not set"


def is_interpreted() -> bool:
    """Returns whether kernels run on the CPU, one program after the other, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def ceil_div(number: int, divisor: int) -> int:
    """Returns `number` / `divisor`, rounded up; both are positive, or `number` is 0."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least `number` and at least 1."""
    return 1 << max(0, number - 1).bit_length()


# Largest finite number of float8_e4m3fn.
FLOAT8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class LayerPools:
    """KV pools of one layer, in bf16, fp16, fp32 or float8_e4m3fn.

    `key`: [N, B, G, D]. `value`: [N, B, G, E]. The tokens of a block are contiguous, blocks need
    not be: stride(0) is free. Raises ValueError for other strides.
    """

    key: Tensor
    value: Tensor
    scales: KVScales = UNIT_SCALES

    def __post_init__(self) -> None:
        """Checks the layout. Raises ValueError."""
        for name, pool in (("key", self.key), ("value", self.value)):
            _, _, num_heads, head_dim = pool.shape
            if pool.stride()[1:] != (num_heads * head_dim, head_dim, 1):
                raise ValueError(
                    f"{name} pool of shape {tuple(pool.shape)} has strides {pool.stride()}:"
                    " blocks must be contiguous"
                )

    @property
    def block_size(self) -> int:
        """Block size B."""
        return self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number G of key/value heads."""
        return self.key.shape[2]

    @property
    def is_float8(self) -> bool:
        """Whether the pool is float8, whose numbers need a scale."""
        return self.key.dtype == torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Rotation of each token's position: `cosine`, `sine`, [T, R / 2] float32, contiguous."""

    cosine: Tensor
    sine: Tensor
