"""The two pools of KV blocks and the moves between them.

Shape letters: N blocks of a pool, B block size (tokens), G key/value heads of a layer, D size of a
key head, E size of a value head, P block pairs of a move.

All layers of a block lie next to each other: a pool is one [N, elements of a block] tensor, and a
layer sees a strided view of it. So a move is one indexed copy, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.errors import OutOfMemory
from executor_service.step import BlockMoves

# A move between the pools goes through a staging copy; this bounds it.
_STAGING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one token in one layer: [num_kv_heads, key_dim] and [.., value_dim]."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        """Numbers stored per token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens over all `layers`."""
    return block_size * dtype.itemsize * sum(layer.elements_per_token for layer in layers)


class KVCache:
    """A device pool and a host pool of equally shaped blocks."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates both pools, zeroed; the host pool is pinned where the device is a GPU.

        Raises OutOfMemory, with the numbers, if they do not fit.
        """
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_bytes = block_bytes(layers, block_size, dtype)
        self.dtype = dtype
        self._device_pool = self._allocate("device", num_device_blocks, device, False)
        self._host_pool = self._allocate(
            "host", num_host_blocks, torch.device("cpu"), device.type == "cuda"
        )
        self.key_pools, self.value_pools = _layer_views(self._device_pool, layers, block_size)

    @property
    def device(self) -> torch.device:
        """Where the device pool is."""
        return self._device_pool.device

    def swap_out(self, moves: BlockMoves) -> None:
        """Copies device blocks `moves.sources` over host blocks `moves.destinations`."""
        self._move_between_pools(self._device_pool, self._host_pool, moves)

    def swap_in(self, moves: BlockMoves) -> None:
        """Copies host blocks `moves.sources` over device blocks `moves.destinations`."""
        self._move_between_pools(self._host_pool, self._device_pool, moves)

    def copy(self, moves: BlockMoves) -> None:
        """Copies device blocks over device blocks, as if every source were read first."""
        if len(moves.sources):
            pool = self._device_pool
            blocks = pool.index_select(0, _indexes(moves.sources, pool.device))
            pool.index_copy_(0, _indexes(moves.destinations, pool.device), blocks)

    def _move_between_pools(self, source: Tensor, destination: Tensor, moves: BlockMoves) -> None:
        # The pools are separate memory, so a move in parts still reads nothing it has written.
        step = max(1, _STAGING_BYTES // max(1, self.block_bytes))
        for start in range(0, len(moves.sources), step):
            part = slice(start, start + step)
            blocks = source.index_select(0, _indexes(moves.sources[part], source.device))
            destination.index_copy_(
                0,
                _indexes(moves.destinations[part], destination.device),
                blocks.to(destination.device),
            )

    def _allocate(
        self, name: str, num_blocks: int, device: torch.device, pin_memory: bool
    ) -> Tensor:
        elements = self.block_bytes // self.dtype.itemsize
        try:
            flat = _zeros(num_blocks * self.block_bytes, device, pin_memory)
            return flat.view(self.dtype).view(num_blocks, elements)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise OutOfMemory(
                f"the {name} pool does not fit: {num_blocks} blocks of {self.block_bytes} bytes"
                f" ({num_blocks * self.block_bytes / 2**30:.2f} GiB)"
            ) from error


def _zeros(num_bytes: int, device: torch.device, pin_memory: bool) -> Tensor:
    """[num_bytes] uint8. Zeros: a kernel may load a whole block and mask by multiplying.

    Raises one of several errors if there is no memory.
    """
    if device.type == "cpu" and not pin_memory and num_bytes:
        # Unlike torch, numpy leaves it to the system to hand out zeroed pages when they are first
        # used: gigabytes cost no time at start.
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)


def _layer_views(
    pool: Tensor, layers: Sequence[LayerShape], block_size: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Views of `pool`: per layer the keys [N, B, G, D] and the values [N, B, G, E]."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    start = 0
    for layer in layers:
        for views, head_dim in ((keys, layer.key_dim), (values, layer.value_dim)):
            shape = (pool.shape[0], block_size, layer.num_kv_heads, head_dim)
            size = block_size * layer.num_kv_heads * head_dim
            views.append(pool.narrow(1, start, size).view(shape))
            start += size
    return keys, values


def _indexes(
    block_ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]], device: torch.device
) -> Tensor:
    return torch.from_numpy(block_ids.astype(np.int64)).to(device)
