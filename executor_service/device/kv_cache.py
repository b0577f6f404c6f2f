"""The two pools of KV blocks, the memory they lie in and the moves between them.

Shape letters: N blocks of a pool, B block size (tokens), G key/value heads of a layer, D size of a
key head, E size of a value head, P block pairs of a move.

All layers of a block lie next to each other, and a layer sees a strided view of the pool. So a
block is moved in one piece, however many layers there are, as whole words, whatever its dtype.
"""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_service.device.host_copies import to_device
from executor_service.errors import OutOfMemory
from executor_service.steps.step import BlockMoves
from splitserve_kernels.paged_batch import UNIT_SCALES, KVScales

Bytes = npt.NDArray[np.uint8]
# Pins memory until it is freed. Raises RuntimeError if that cannot be.
Pin = Callable[[Bytes], None]
# Copies blocks [P] of a pool [N, W] over blocks [P] of it, int64 each. No block is both, none is
# copied over twice: `batch_checks.py` refuses such a batch.
CopyBlocks = Callable[[Tensor, Tensor, Tensor], None]

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_CACHE_LINE = 64
_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts

_log = logging.getLogger(__name__)


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
        scales: Sequence[KVScales] = (),
    ) -> None:
        """Allocates both pools, zeroed; the host pool is pinned where the device is a GPU.

        `copy_blocks`: what copies within the device pool; plain torch if it is None. `scales`: what
        the numbers of each layer stand for; none: they stand for themselves. A host pool
        that cannot be pinned is said in the log. Raises OutOfMemory, with the numbers, if a pool
        does not fit.
        """
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_bytes = block_bytes(layers, block_size, dtype)
        self.dtype = dtype
        self.scales = tuple(scales) or (UNIT_SCALES,) * len(layers)
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

    def of_layers(self, layers: slice) -> KVCache:
        """The same blocks, as a model sees them that has only these layers of them."""
        part = copy.copy(self)
        part.key_pools, part.value_pools = self.key_pools[layers], self.value_pools[layers]
        part.scales = self.scales[layers]
        return part

    def swap_out(self, moves: BlockMoves) -> None:
        """Copies device blocks `moves.sources` over host blocks `moves.destinations`.

        On a GPU this is only asked for, of the current stream; so are the other moves.
        """
        _move(self._device_pool, self._host_pool, moves)

    def swap_in(self, moves: BlockMoves) -> None:
        """Copies host blocks `moves.sources` over device blocks `moves.destinations`."""
        _move(self._host_pool, self._device_pool, moves)

    def copy(self, moves: BlockMoves) -> None:
        """Copies device blocks over device blocks. None is both source and destination."""
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
    """Copies blocks of `pool`. Every source is read before anything is written."""
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


def device_memory(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8. Zeros: a kernel may load a whole block and mask by multiplying.

    Raises one of several errors if there is no memory.
    """
    if device.type == "cpu":
        return host_memory(num_bytes, None)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def host_memory(num_bytes: int, pin: Pin | None) -> Tensor:
    """[num_bytes] uint8, zeros, from the start of a cache line on.

    What `pin` refuses stays pageable: slower, but it does.

    Raises MemoryError or ValueError if there is no memory.
    """
    # Unlike torch, numpy leaves it to the system to hand out zeroed pages when they are first used:
    # gigabytes cost no time at start.
    memory = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % _CACHE_LINE :][:num_bytes]
    if pin is not None and num_bytes:
        # Pages are handed out to all threads at once; to be pinned, one after the other.
        torch.from_numpy(memory).zero_()
        try:
            pin(memory)
        except RuntimeError as error:
            _log.warning(
                "host_pool_not_pinned num_bytes=%d gib=%.2f reason=%r: swaps are slower and do not"
                " overlap with computing; a smaller --num-host-blocks may help",
                num_bytes,
                num_bytes / 2**30,
                str(error),
            )
    return torch.from_numpy(memory)


def pin_for(device: torch.device) -> Pin | None:
    """How to pin what `device` is to reach; None where there is no need."""
    return pin_for_cuda if device.type == "cuda" else None


def pin_for_cuda(memory: Bytes) -> None:
    """Torch's own pinned memory would take the next power of two of bytes."""
    cuda: Any = torch.cuda
    runtime, address = cuda.cudart(), memory.ctypes.data
    status = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if status != 0:
        _forget_error()
        raise RuntimeError(f"cudaHostRegister: error {status}")
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


def _forget_error() -> None:
    """The runtime keeps its last error for whoever looks next: each kernel that torch launches."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
