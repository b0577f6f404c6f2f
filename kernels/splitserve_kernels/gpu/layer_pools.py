"""KV pools of one layer in the form that kernels take.

Shape letters: N blocks of the pool, B block size, G key/value heads, D size of a key head, E size
of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve_kernels.paged_batch import UNIT_SCALES, KVScales

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
                    f"{name} pool of shape {tuple(pool.shape)} has strides {pool.stride()}: inside"
                    " a block it must be contiguous"
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
