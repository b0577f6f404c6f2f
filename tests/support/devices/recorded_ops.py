"""A CUDA graph's manners on the CPU: operations are recorded, and repeated on the same memory.

Like a graph it refuses what needs a number on the host, and what Python decided while it was
recorded stays decided. Between replays, what a recording allocated for itself is overwritten.
"""

# What torch dispatches is of any type.
# ruff: noqa: ANN401

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor_service.device.kv_cache import KVCache
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import PagedModel, TransformersModel
from splitserve_kernels.paged_batch import UNIT_SCALES, AttentionOptions, KVScales, PagedBatch

if TYPE_CHECKING:
    from splitserve_kernels.gpu.launch import LayerPools, RotaryTables

_READS_ON_HOST = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")


class SyncWhileRecording(RuntimeError):
    """An operation that needs the device's answer."""


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation with the memory it works on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if any(name in func.name() for name in _READS_ON_HOST):
            raise SyncWhileRecording(func.name())
        output = func(*args, **(kwargs or {}))
        self.entries.append((func, args, kwargs or {}, list(_tensors(output))))
        return output


class RecordedOps:
    """A Recorder. `fails`: recording raises."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self.pool_bytes = 0
        self._fails = fails

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        run()
        with _Tape() as tape:
            run()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            for func, args, kwargs, outputs in tape.entries:
                repeated = list(_tensors(func(*args, **kwargs)))
                for old, new in zip(outputs, repeated, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


class RunAgain:
    """A Recorder that records nothing, for kernels that are no operations of torch."""

    pool_bytes = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def _tensors(output: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


class StaticAttention:
    """A backend of plain torch operations that depend on shapes only."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        scales: KVScales = UNIT_SCALES,
    ) -> None:
        """Slots below 0 are not written. `key`: [T, G, D]; pools: [N, B, G, D]."""
        _write(key, key_pool, batch.slot_mapping)
        _write(value, value_pool, batch.slot_mapping)

    def paged_attention(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """`query`: [T, H, D]. Looks up whole tables, -1 as block 0. Added tokens get anything."""
        tokens = torch.arange(len(query), dtype=torch.int32)
        # Of rows without tokens none is the last that begins where another does.
        rows = torch.searchsorted(batch.query_starts, tokens, right=True) - 1
        rows = rows.clamp(max=batch.num_rows - 1)
        positions = batch.num_computed_tokens[rows] + tokens - batch.query_starts[rows]
        tables = batch.block_tables[rows].clamp(min=0).long()
        group = query.shape[1] // key_pool.shape[2]
        keys = key_pool[tables].flatten(1, 2).repeat_interleave(group, dim=2)
        values = value_pool[tables].flatten(1, 2).repeat_interleave(group, dim=2)
        scores = torch.einsum("thd,tchd->thc", query, keys) * options.scale
        distances = positions[:, None] - torch.arange(keys.shape[1])[None, :]
        is_hidden = distances < 0
        if options.sliding_window is not None:
            is_hidden |= distances >= options.sliding_window
        scores = scores.masked_fill(is_hidden[:, None, :], -torch.inf)
        return torch.einsum("thc,tchd->thd", torch.softmax(scores, dim=-1), values)


def static_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
    """The model as `transformers` has it, attending by StaticAttention."""
    return TransformersModel(loaded, cache, StaticAttention())


def write_turned(
    heads: tuple[Tensor, Tensor, Tensor],
    rotary: RotaryTables,
    pools: LayerPools,
    slots: Tensor,
) -> Tensor:
    """`rotary_kv_write` of plain torch operations that depend on shapes only."""
    query, key, value = heads
    _write(_turned(key, rotary), pools.key, slots)
    _write(value, pools.value, slots)
    return _turned(query, rotary)


def rms_norm_in_torch(numbers: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` of plain torch operations, as Hugging Face's Llama has it."""
    return weight * functional.rms_norm(numbers, numbers.shape[-1:], eps=epsilon)


def add_rms_norm_in_torch(
    numbers: Tensor, addend: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of plain torch operations."""
    total = numbers + addend
    return total, rms_norm_in_torch(total, weight, epsilon)


def gated_product_in_torch(gate_up: Tensor) -> Tensor:
    """`gated_product` of plain torch operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


# By what they are called in `gpu_decoder`: what a decoder launches beside attention.
TORCH_KERNELS: Mapping[str, Callable[..., Any]] = {
    "rotary_kv_write": write_turned,
    "rms_norm": rms_norm_in_torch,
    "add_rms_norm": add_rms_norm_in_torch,
    "gated_product": gated_product_in_torch,
}


def _turned(heads: Tensor, rotary: RotaryTables) -> Tensor:
    """[T, .., D]."""
    half = rotary.cosine.shape[1]
    x, y, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cosine, sine = rotary.cosine[:, None], rotary.sine[:, None]
    turned = torch.cat([x * cosine - y * sine, y * cosine + x * sine, rest], dim=-1)
    return turned.to(heads.dtype)


def _write(heads: Tensor, pool: Tensor, slots: Tensor) -> None:
    """`heads`: [T, G, D], `pool`: [N, B, G, D]."""
    num_slots = pool.shape[0] * pool.shape[1]
    hits = torch.arange(num_slots)[:, None] == slots[None, :]
    writer = hits.to(torch.int64).argmax(dim=1)
    flat = pool.reshape(num_slots, *pool.shape[2:])
    is_written = hits.any(dim=1)[:, None, None]
    pool.copy_(torch.where(is_written, heads[writer], flat).view(pool.shape))
