"""The two pools of KV blocks and the moves between them.

Shape letters: N blocks of a pool, B block size (tokens), G key/value heads of a layer, D size of a
key head, E size of a value head, P block pairs of a move.

All layers of a block lie next to each other, and a layer sees a strided view of the pool. So a
block is moved in one piece, however many layers there are, as whole words, whatever its dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from executor_service.errors import OutOfMemory
from executor_service.host_copies import to_device
from executor_service.pool_memory import device_memory, host_memory, pin_for
from executor_service.step import BlockMoves

# Copies blocks [P] of a pool [N, W] over blocks [P] of it, int64 each. No block is both, none is
# copied over twice: `batch_checks.py` refuses such a batch.
CopyBlocks = Callable[[Tensor, Tensor, Tensor], None]

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


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
        copy_blocks: CopyBlocks | None = None,
    ) -> None:
        """Allocates both pools, zeroed; the host pool is pinned where the device is a GPU.

        `copy_blocks`: what copies within the device pool; plain torch if it is None. A host pool
        that cannot be pinned is said in the log. Raises OutOfMemory, with the numbers, if a pool
        does not fit.
        """
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_bytes = block_bytes(layers, block_size, dtype)
        self.dtype = dtype
        self._copy_blocks = copy_blocks or copy_in_torch
        pool = self._allocate("device", num_device_blocks, partial(device_memory, device=device))
        host_pool = self._allocate(
            "host", num_host_blocks, partial(host_memory, pin=pin_for(device))
        )
        self._device_pool, self._host_pool = _as_words(pool), _as_words(host_pool)
        self.key_pools, self.value_pools = _layer_views(pool.view(dtype), layers, block_size)

    @property
    def device(self) -> torch.device:
        """Where the device pool is."""
        return self._device_pool.device

    def swap_out(self, moves: BlockMoves) -> None:
        """Copies device blocks `moves.sources` over host blocks `moves.destinations`.

        On a GPU this is only asked for, of the current stream; so are the other moves.
        """
        _move(self._device_pool, self._host_pool, moves)

    def swap_in(self, moves: BlockMoves) -> None:
        """Copies host blocks `moves.sources` over device blocks `moves.destinations`."""
        _move(self._host_pool, self._device_pool, moves)

    def copy(self, moves: BlockMoves) -> None:
        """Copies device blocks over device blocks; see CopyBlocks."""
        if len(moves.sources):
            sources, destinations = (
                to_device(ids.astype(np.int64), self.device)
                for ids in (moves.sources, moves.destinations)
            )
            self._copy_blocks(self._device_pool, sources, destinations)

    def _allocate(self, name: str, num_blocks: int, allocate: Callable[[int], Tensor]) -> Tensor:
        """[N, bytes of a block] uint8."""
        try:
            memory = allocate(num_blocks * self.block_bytes)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise OutOfMemory(
                f"the {name} pool does not fit: {num_blocks} blocks of {self.block_bytes} bytes"
                f" ({num_blocks * self.block_bytes / 2**30:.2f} GiB); num_{name}_blocks can be less"
            ) from error
        return memory.view(num_blocks, self.block_bytes)


def copy_in_torch(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """See CopyBlocks. Every source is read before anything is written."""
    pool.index_copy_(0, destinations, pool.index_select(0, sources))


def _as_words(pool: Tensor) -> Tensor:
    """`pool` [N, bytes] as [N, words], the widest there are: they move fastest."""
    word = next(word for word in _WORDS if pool.shape[1] % word.itemsize == 0)
    return pool.view(word)


def _move(source: Tensor, destination: Tensor, moves: BlockMoves) -> None:
    """Copies blocks between pools that are separate memory, so their order does not matter."""
    if not len(moves.sources):
        return
    breaks = (np.diff(moves.sources) != 1) | (np.diff(moves.destinations) != 1)
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    for start, end in itertools.pairwise([*starts, len(moves.sources)]):
        first, target = int(moves.sources[start]), int(moves.destinations[start])
        blocks = source[first : first + end - start]
        destination[target : target + end - start].copy_(blocks, non_blocking=True)


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
