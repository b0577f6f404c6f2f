"""CUDA graphs in software: operations are recorded on the CPU, and repeated on the same memory.

Like a graph, a recording refuses what needs a number on the host, and what Python decided while it
was recorded stays decided. Between replays, what a recording allocated for itself is overwritten.
"""

# Arguments and results of torch's operations may have any type.
# ruff: noqa: ANN401

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor_service.device import KVCache
from executor_service.model import LoadedModel, PagedModel, TransformersModel
from executor_service.sampling import uniform
from executor_service.steps import Int64Array
from splitserve_kernels.draw_rows import DrawRows
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


_NUM_COLUMNS = 6


class SortingDraw:
    """`num_drawn`: how often it was asked on the host."""

    num_drawn = 0

    def num_words(self, num_rows: int) -> int:
        return _NUM_COLUMNS * num_rows

    def pack(self, rows: DrawRows, words: Int64Array) -> None:
        columns = words.reshape(_NUM_COLUMNS, -1)
        columns[:] = 0
        columns[0, : len(rows)] = rows.seeds
        columns[1, : len(rows)] = rows.positions
        columns[2, : len(rows)] = rows.top_k
        for index, numbers in ((3, rows.temperatures), (4, rows.top_p), (5, rows.min_p)):
            columns[index].view(np.float64)[: len(rows)] = numbers

    def advance(self, words: Tensor, num_positions: Tensor) -> None:
        words.view(_NUM_COLUMNS, -1)[1].add_(num_positions)

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        self.num_drawn += 1
        vocab_size = logits.shape[1]
        seeds, positions, top_k, *floats = words.view(_NUM_COLUMNS, -1)
        temperature, top_p, min_p = (column.view(torch.float64)[:, None] for column in floats)
        largest, first = logits.max(dim=-1)
        is_greedy = temperature[:, 0] == 0
        divisor = torch.where(temperature == 0, 1.0, temperature).float()
        falling = ((logits - largest[:, None]) / divisor).sort(dim=-1, descending=True, stable=True)
        weights = torch.exp(falling.values)
        ranks = torch.arange(vocab_size, device=logits.device)[None, :]
        least = falling.values.gather(-1, (top_k.clamp(1, vocab_size) - 1)[:, None])
        stays = (falling.values >= least) & (weights >= min_p.float())
        eligible = torch.where(falling.values >= least, weights, 0.0).double()
        before = eligible.cumsum(dim=-1) - eligible
        total = eligible.sum(dim=-1, keepdim=True)
        stays &= (before < top_p * total) | (top_p >= 1)
        kept = torch.where(stays | (ranks == 0), weights, 0.0)
        by_id = torch.zeros_like(kept).scatter(-1, falling.indices, kept).double()
        running = by_id.cumsum(dim=-1)
        target = uniform(seeds, positions)[:, None] * running[:, -1:]
        drawn = (running <= target).sum(dim=-1).clamp(max=vocab_size - 1)
        token_ids = torch.where(is_greedy, first, drawn)
        return torch.where(torch.isfinite(largest), token_ids, -1).to(torch.int32)


# Operations whose result, or whose shape, depends on numbers.
_WAITING_OPERATIONS = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "unique",
    "equal",
)
# Of a number of the host, which torch copies to the device and waits for.
_ASSIGNMENTS = ("index_put", "index_put_")
_METHODS = ("cpu", "numpy", "tolist", "item", "__bool__", "__index__", "__int__", "__float__")


class WaitedForDevice(AssertionError):
    """The host read a value before the device had computed it."""


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in _WAITING_OPERATIONS or (name in _ASSIGNMENTS and args[2].dim() == 0):
            raise WaitedForDevice(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Raises WaitedForDevice when a tensor is read on the host inside the context."""
    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(patch.object(Tensor, name, _refusing(name)))
        stack.enter_context(_NoReads())  # type: ignore[no-untyped-call]
        yield


def _refusing(name: str) -> Any:
    def method(self: Tensor, *_: object) -> Any:
        raise WaitedForDevice(f"Tensor.{name} of {tuple(self.shape)}")

    return method
