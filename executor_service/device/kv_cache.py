"""Pools of KV blocks on device and host, their memory, and block moves between them.

Shape letters: N blocks of a pool, B block size (tokens), G key/value heads of a layer, D size of a
key head, E size of a value head, P block pairs of a move.

All layers of a block are adjacent in memory, and a layer sees a strided view of the pool. So a
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

from executor_service.device.streams import DeviceStreams, Timer
from executor_service.errors import OutOfMemory
from executor_service.steps import BlockMoves, Int32Array, StepInput
from splitserve_kernels.paged_batch import SCALE_BYTES, UNIT_SCALES, KVScales

Bytes = npt.NDArray[np.uint8]
# Pins memory until it is freed. Raises RuntimeError if that fails.
Pin = Callable[[Bytes], None]
# Copies blocks [P] of a pool [N, W] over blocks [P] of the same pool, int64 each. No block is both
# source and destination, and none is a destination twice: `batch_checks.py` refuses such a batch.
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


def block_bytes(
    layers: Sequence[LayerShape],
    block_size: int,
    dtype: torch.dtype,
    scales: Sequence[KVScales] = (),
) -> int:
    """Returns the bytes of one block: keys and values of `block_size` tokens in all `layers`.

    `scales`: as in KVCache; those in slots take memory.
    """
    num_elements = sum(layer.elements_per_token for layer in layers)
    num_scales = sum(
        2 * layer.num_kv_heads
        for layer, each in zip(layers, scales or [UNIT_SCALES] * len(layers), strict=True)
        if each.in_slots
    )
    return block_size * (num_elements * dtype.itemsize + num_scales * SCALE_BYTES)


class KVCache:
    """Device pool and host pool of equally shaped blocks."""

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

        `copy_blocks`: copies within the device pool; None for plain torch. `scales`: scales of the
        stored numbers, per layer; empty for none. Where they are in slots, a block carries them,
        and pools have SCALE_BYTES more elements per head, of 8 bits each. Logs a warning if the
        host pool cannot be pinned. Raises OutOfMemory, with the numbers, if a pool does not fit.
        """
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_bytes = block_bytes(layers, block_size, dtype, scales)
        self.dtype = dtype
        self.scales = tuple(scales) or (UNIT_SCALES,) * len(layers)
        self._copy_blocks = copy_blocks or copy_in_torch
        pool = self._allocate("device", num_device_blocks, partial(device_memory, device=device))
        host_pool = self._allocate(
            "host", num_host_blocks, partial(host_memory, pin=pin_for(device))
        )
        self._device_pool, self._host_pool = _as_words(pool), _as_words(host_pool)
        self.key_pools, self.value_pools = _layer_views(
            pool.view(dtype), layers, block_size, self.scales
        )

    @property
    def device(self) -> torch.device:
        """Device of the device pool."""
        return self._device_pool.device

    def of_layers(self, layers: slice) -> KVCache:
        """Returns a view of the same blocks for a model that has only these layers."""
        part = copy.copy(self)
        part.key_pools, part.value_pools = self.key_pools[layers], self.value_pools[layers]
        part.scales = self.scales[layers]
        return part

    def swap_out(self, moves: BlockMoves) -> None:
        """Copies device blocks `moves.sources` over host blocks `moves.destinations`.

        On a GPU this and the other moves are only queued on the current stream.
        """
        _move(self._device_pool, self._host_pool, moves)

    def swap_in(self, moves: BlockMoves) -> None:
        """Copies host blocks `moves.sources` over device blocks `moves.destinations`."""
        _move(self._host_pool, self._device_pool, moves)

    def copy(self, moves: BlockMoves) -> None:
        """Copies device blocks over device blocks. No block is both source and destination."""
        if len(moves.sources):
            sources, destinations = (
                to_device(ids.astype(np.int64), self.device)
                for ids in (moves.sources, moves.destinations)
            )
            self._copy_blocks(self._device_pool, sources, destinations)

    def _allocate(self, name: str, num_blocks: int, allocate: Callable[[int], Tensor]) -> Tensor:
        """Allocates a pool, [N, bytes of a block] uint8. Raises OutOfMemory."""
        try:
            memory = allocate(num_blocks * self.block_bytes)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise OutOfMemory(
                f"the {name} pool does not fit: {num_blocks} blocks of {self.block_bytes} bytes"
                f" ({num_blocks * self.block_bytes / 2**30:.2f} GiB); lower --num-{name}-blocks"
            ) from error
        return memory.view(num_blocks, self.block_bytes)


def copy_in_torch(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copies blocks of `pool`. Reads every source before it writes a destination."""
    pool.index_copy_(0, destinations, pool.index_select(0, sources))


def _as_words(pool: Tensor) -> Tensor:
    """Views `pool` [N, bytes] as [N, words] of the widest dtype that fits, which moves fastest."""
    word = next(word for word in _WORDS if pool.shape[1] % word.itemsize == 0)
    return pool.view(word)


def _move(source: Tensor, destination: Tensor, moves: BlockMoves) -> None:
    """Copies blocks between separate pools, in any order; adjacent blocks in one copy."""
    if not len(moves.sources):
        return
    breaks = (np.diff(moves.sources) != 1) | (np.diff(moves.destinations) != 1)
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    for start, end in itertools.pairwise([*starts, len(moves.sources)]):
        first, target = int(moves.sources[start]), int(moves.destinations[start])
        blocks = source[first : first + end - start]
        destination[target : target + end - start].copy_(blocks, non_blocking=True)


def _layer_views(
    pool: Tensor, layers: Sequence[LayerShape], block_size: int, scales: Sequence[KVScales]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns views of `pool`: per layer the keys [N, B, G, D] and the values [N, B, G, E].

    Scales in slots make heads longer.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    start = 0
    for layer, of_layer in zip(layers, scales, strict=True):
        more = SCALE_BYTES if of_layer.in_slots else 0
        for views, head_dim in ((keys, layer.key_dim + more), (values, layer.value_dim + more)):
            shape = (pool.shape[0], block_size, layer.num_kv_heads, head_dim)
            size = block_size * layer.num_kv_heads * head_dim
            views.append(pool.narrow(1, start, size).view(shape))
            start += size
    return keys, values


def device_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Returns zeroed device memory, [num_bytes] uint8.

    Zeros are needed because a kernel may load a whole block and mask by multiplying. Raises one of
    several errors if there is no memory.
    """
    if device.type == "cpu":
        return host_memory(num_bytes, None)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def host_memory(num_bytes: int, pin: Pin | None) -> Tensor:
    """Returns zeroed host memory, [num_bytes] uint8, aligned to a cache line.

    Memory that `pin` refuses stays pageable: slower, but usable. Raises MemoryError or ValueError
    if there is no memory.
    """
    # Unlike torch, numpy lets the system hand out zeroed pages when they are first used, so
    # gigabytes cost no time at start.
    memory = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % _CACHE_LINE :][:num_bytes]
    if pin is not None and num_bytes:
        # Zeroing touches the pages with all threads; pinning would touch them one after the other.
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
    """Returns the function that pins memory for `device`; None where pinning is not needed."""
    return pin_for_cuda if device.type == "cuda" else None


def pin_for_cuda(memory: Bytes) -> None:
    """Pins `memory`; torch's own would be rounded up to a power of two. Raises RuntimeError."""
    cuda: Any = torch.cuda
    runtime, address = cuda.cudart(), memory.ctypes.data
    status = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if status != 0:
        _forget_error()
        raise RuntimeError(f"cudaHostRegister: error {status}")
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


def _forget_error() -> None:
    """Clears the runtime's last error, which the next kernel launch of torch would report."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


# -- Copies between host and device within a step --------------------------------------------------
#
# On a GPU a blocking copy to the host waits for all queued work. So a step makes one asynchronous
# copy, and reads it when the step is finished.

Array = npt.NDArray[Any]


def to_device(array: Array, device: torch.device) -> Tensor:
    """Copies `array` to `device`, without waiting for work queued before."""
    # A copy of memory that is not pinned has read its source when this returns.
    return torch.from_numpy(array).to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> tuple[Array, ...]:
    """Copies `tensors` of one device, 32-bit or boolean, to the host in one copy; waits for it."""
    return HostCopy(tensors, Tensor.cpu).arrays()


class HostCopy:
    """Copy to the host of tensors of one device, 32-bit or boolean, in one transfer."""

    def __init__(self, tensors: tuple[Tensor, ...], copy: Callable[[Tensor], Tensor]) -> None:
        """`copy` brings one tensor to the host; called once, or not at all without tensors."""
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if len(tensors) > 1:
            words = [_as_numbers(tensor).flatten() for tensor in tensors]
            self._copied = copy(torch.cat(words))
        elif tensors:
            self._copied = copy(tensors[0])

    def arrays(self) -> tuple[Array, ...]:
        """Returns the tensors as arrays; to be called when the copy is complete."""
        if len(self._kinds) == 1:
            return (self._copied.numpy(),)
        arrays, start = [], 0
        for shape, dtype in self._kinds:
            end = start + shape.numel()
            is_bool = dtype == torch.bool
            part = self._copied[start:end].view(torch.int32 if is_bool else dtype)
            arrays.append(part.view(shape).to(dtype).numpy())
            start = end
        return tuple(arrays)


def _as_numbers(tensor: Tensor) -> Tensor:
    """Returns the bits of `tensor` as 32-bit numbers."""
    numbers = tensor.int() if tensor.dtype == torch.bool else tensor
    return numbers.contiguous().view(torch.int32)


# -- Block moves of a step: swaps beside the computing ---------------------------------------------
#
# Two accesses to a block, one of which writes, are ordered as follows. The swap stream does its
# moves in order, and those of a step after all that was computed before. Compute always waits for
# swap-ins; it waits for swap-outs before it touches a block that they still read. Blocks of the
# host pool are accessed by the swap stream alone.


class BlockTransfers:
    """Moves blocks between and within the pools of a cache."""

    def __init__(self, cache: KVCache, streams: DeviceStreams) -> None:
        self._cache = cache
        self._streams = streams
        # Device blocks that swap-outs may still be reading, with the timers of these swap-outs.
        self._leaving: list[tuple[Timer, Int32Array]] = []

    def begin(self, step: StepInput) -> list[Timer]:
        """Queues all moves of `step`; computing queued later sees them done.

        Returns the timers of the moves; the moves are complete when these timers are over.
        """
        timers: list[Timer] = []
        if len(step.swap_out.sources) or len(step.swap_in.sources):
            timers.append(self._swap(step))
        if len(step.swap_in.sources) or self._overwrites_leaving(step):
            self._streams.compute_after_swap()
            self._leaving.clear()
        if len(step.copy.sources):
            timer = self._streams.start_timer()
            self._cache.copy(step.copy)
            timer.stop()
            timers.append(timer)
        return timers

    def finish(self, timers: Sequence[Timer]) -> int:
        """Waits for the moves that `timers` measure; returns their duration in microseconds."""
        move_us = sum(timer.elapsed_us() for timer in timers)
        for number, (timer, _) in enumerate(self._leaving):
            if timer in timers:
                # Swaps are done in order, so earlier ones are done too, even of steps that failed.
                del self._leaving[: number + 1]
                break
        return move_us

    def _swap(self, step: StepInput) -> Timer:
        self._streams.swap_after_compute()
        with self._streams.swapping():
            timer = self._streams.start_timer()
            self._leaving.append((timer, step.swap_out.sources))
            self._cache.swap_out(step.swap_out)
            self._cache.swap_in(step.swap_in)
            timer.stop()
        return timer

    def _overwrites_leaving(self, step: StepInput) -> bool:
        if not self._leaving:
            return False
        leaving = np.concatenate([blocks for _, blocks in self._leaving])
        return bool(np.isin(leaving, _touched(step)).any())


def _touched(step: StepInput) -> Int32Array:
    """Returns the device blocks that compute may write in `step`, and possibly more blocks."""
    parts = [step.block_tables.ravel(), step.copy.destinations]
    if step.cross is not None:
        parts.append(step.cross.block_tables.ravel())
    touched: Int32Array = np.concatenate(parts)
    return touched
