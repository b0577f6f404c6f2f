"""Slots of loaded adapters on a GPU, and what a pass adds to the outputs of linear layers.

Kernels find an adapter's matrices by its slot, in memory that stays where it is: a recorded step
serves whatever adapters have the slots when it is replayed. The matrices themselves stay where
loading has put them.

Shape letters: T input tokens, S rows of logits, n rows of one adapter, I inputs of a layer, O
outputs, W width of the model, V vocabulary.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from executor_service.device import IntegerArrays
from executor_service.model.adapter import (
    JOINED_MODULES,
    AdaptedTokens,
    Adapter,
    AdapterLimits,
    Target,
)
from executor_service.model.input_batch import InputBatch, PassTiles
from executor_service.steps import Int32Array
from splitserve_kernels.adapter_tiles import (
    NUM_WORDS,
    PackedSlot,
    SlotLinear,
    TokenTiles,
    lay_out_tiles,
)
from splitserve_kernels.low_rank_update import LowRankUpdate

# Of adapters for trials: large enough to be seen in the logits.
_RANDOM_SCALE = 0.5

# Adds the updates of the tokens in tiles to the outputs [T, O] of a linear layer for inputs [T, I],
# whose bias [O] is given. See `splitserve_kernels.gpu.low_rank.add_low_rank`.
AddLowRank = Callable[[Tensor, Tensor, TokenTiles, SlotLinear, Tensor | None], None]
# Returns kernels that do that; None if there are none. It may take seconds.
ChooseAdding = Callable[[], AddLowRank | None]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of an adapter that changes more than linear layers.

    `tokens`: [n] int64, indexes of input tokens. `lines`: the same of rows of logits.
    """

    adapter: Adapter
    tokens: Tensor
    lines: Tensor


class PassUpdates:
    """Low-rank updates of the adapters of a pass."""

    def __init__(
        self,
        add: AddLowRank,
        linears: Sequence[SlotLinear],
        tiles: PassTiles,
        changed: Collection[int] | None,
        others: Sequence[AdapterRows] = (),
    ) -> None:
        """`changed`: indexes of the layers that are changed; None for all.

        `others`: rows of adapters that change more than linear layers.
        """
        self._add = add
        self._linears = linears
        self._tiles = tiles
        self._changed = changed
        self._others = others

    def changes(self, layer: int) -> bool:
        """Returns whether a layer may be changed."""
        return self._changed is None or layer in self._changed

    def add(
        self, layer: int, x: Tensor, output: Tensor, bias: Tensor | None, *, of_lines: bool = False
    ) -> None:
        """Changes `output` [.., O] in place, what a layer with `bias` computed of `x` [.., I].

        `of_lines`: rows are those of logits, else those of input tokens.
        """
        if self.changes(layer):
            tiles = self._tiles.lines if of_lines else self._tiles.tokens
            self._add(x, output, tiles, self._linears[layer], bias)

    def change_embeddings(self, token_ids: Tensor, hidden: Tensor) -> None:
        """Changes the embeddings `hidden` [T, W] of `token_ids` [T] in place."""
        for rows in self._others:
            ids, own = token_ids[rows.tokens], rows.adapter.own_embedding
            changed = hidden[rows.tokens] if own is None else own[ids]
            update = rows.adapter.embedding
            if update is not None:
                reduced = update.scale * update.down.T[ids].float()
                sums = changed.float() + reduced @ update.up.float().T
                changed = sums if update.gain is None else update.gain * sums
            hidden[rows.tokens] = changed.to(hidden.dtype)

    def replace_head(self, x: Tensor, output: Tensor, bias: Tensor | None) -> None:
        """Computes rows of `output` [S, V] again if they have a head of their own. `x`: [S, W].

        `bias`: of the model's head. Call it before `add`.
        """
        for rows in self._others:
            own = rows.adapter.own_head
            if own is not None:
                output[rows.lines] = functional.linear(x[rows.lines], own, bias)


class AdapterSlots:
    """Gives adapters slots, and keeps there where their matrices are. Any thread may call it.

    A slot belongs to its adapter as long as anyone has the adapter. A step that was launched
    before reads the slot, and the memory of the matrices, before what is launched later writes
    there: all of it is launched on one stream.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Target]],
        limits: AdapterLimits,
        device: torch.device,
        dtype: torch.dtype,
        add: AddLowRank,
    ) -> None:
        """`layers`: linear layers of the model; a fused layer has several targets, at most 3.

        `dtype`: of the model and of all matrices.
        """
        self.limits = limits
        self._dtype = dtype
        self._targets = {t.name: t for parts in layers for t in parts}
        # Index of the layer of each target, by name.
        self.layer_of = {t.name: i for i, parts in enumerate(layers) for t in parts}
        self._add = add
        # Adapters of a step that is being launched may have been replaced already.
        num_slots = 2 * limits.max_num
        self._words = torch.zeros(
            num_slots, len(self._targets), NUM_WORDS, dtype=torch.int64, device=device
        )
        self.linears: list[SlotLinear] = []
        begin = 0
        for parts in layers:
            words = self._words[:, begin : begin + len(parts)]
            sizes = tuple(target.num_outputs for target in parts)
            max_rank = max(map(self._max_rank, parts))
            self.linears.append(SlotLinear(words, sizes, max_rank))
            begin += len(parts)
        self._lock = threading.Lock()
        self._slots = weakref.WeakKeyDictionary[Adapter, tuple[int, PackedSlot]]()

    @torch.inference_mode()
    def prepare(self, adapter: Adapter) -> int:
        """Returns the slot of `adapter`, which is written if it is new.

        Raises ValueError if the adapter has other layers or sizes than the model, and RuntimeError
        if no slot is free.
        """
        with self._lock:
            found = self._slots.get(adapter)
        if found is not None:
            return found[0]
        if adapter.experts:
            raise ValueError(f"{next(iter(adapter.experts))}: adapters cannot change it on a GPU")
        self._check(adapter.updates)
        packed = PackedSlot([adapter.updates.get(name) for name in self._targets])
        with self._lock:
            if adapter not in self._slots:
                taken = {slot for slot, _ in self._slots.values()}
                free = (slot for slot in range(len(self._words)) if slot not in taken)
                slot = next(free, None)
                if slot is None:
                    raise RuntimeError(f"all {len(self._words)} slots of adapters are in use")
                self._words[slot].copy_(packed.words, non_blocking=True)
                self._slots[adapter] = slot, packed
            return self._slots[adapter][0]

    def random_adapter(self, seed: int, rank: int = 4) -> Adapter:
        """Returns an adapter of all layers with random numbers, for trials; it has no slot yet."""
        generator = torch.Generator().manual_seed(seed)
        rank = min(rank, self.limits.max_rank)

        def random(rows: int, columns: int) -> Tensor:
            numbers = torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)
            return numbers.to(self._words.device, self._dtype)

        updates = {
            name: LowRankUpdate(
                random(rank, target.num_inputs), random(target.num_outputs, rank), _RANDOM_SCALE
            )
            for name, target in self._targets.items()
        }
        return Adapter(f"trial {seed}", updates)

    def slots_of(self, adapted: AdaptedTokens) -> Int32Array:
        """Returns the slot of each token, [T], -1 for none. Prepares its adapters."""
        slots = np.array([*map(self.prepare, adapted.adapters), -1], np.int32)
        return slots[adapted.of_token]

    def updates_of(self, batch: InputBatch) -> PassUpdates | None:
        """Returns what adapters add in a pass; None if no token has one."""
        tiles, adapted = batch.tensors.tiles, batch.rows.adapted
        if tiles is not None:
            return PassUpdates(self._add, self.linears, tiles, None)
        if adapted is None:
            return None
        tiles = self._send(batch, self.slots_of(adapted))
        names = {name for each in adapted.adapters for name in each.updates}
        changed = {self.layer_of[name] for name in names}
        return PassUpdates(self._add, self.linears, tiles, changed, _others(batch, adapted))

    def _send(self, batch: InputBatch, of_token: Int32Array) -> PassTiles:
        of_line = of_token[batch.rows.logits_index]
        arrays = [*lay_out_tiles(of_token), *lay_out_tiles(of_line)]
        _, (order, tiles, order_of_lines, tiles_of_lines) = batch.uploads.send(
            IntegerArrays([], arrays)
        )
        return PassTiles(TokenTiles(order, tiles), TokenTiles(order_of_lines, tiles_of_lines))

    def _check(self, updates: Mapping[str, LowRankUpdate]) -> None:
        """Raises ValueError if an update does not fit its layer."""
        for name, update in updates.items():
            target = self._targets.get(name)
            if target is None:
                raise ValueError(f"{name}: adapters cannot change it on a GPU")
            rank, most = len(update.down), self._max_rank(target)
            if rank > most:
                raise ValueError(f"{name}: the rank is {rank}; allowed: at most {most}")
            vectors = [each for each in (update.bias, update.gain) if each is not None]
            found = [update.down.shape, update.up.shape, *(each.shape for each in vectors)]
            matrices = [(rank, target.num_inputs), (target.num_outputs, rank)]
            if [tuple(s) for s in found] != [*matrices, *((target.num_outputs,) for _ in vectors)]:
                raise ValueError(f"{name}: the update has other sizes than the layer")

    def _max_rank(self, target: Target) -> int:
        joined = JOINED_MODULES.get(target.name.rpartition(".")[2], ())
        return self.limits.max_rank * max(len(joined), 1)


def _others(batch: InputBatch, adapted: AdaptedTokens) -> list[AdapterRows]:
    """Returns the rows of adapters that change more than linear layers."""
    of_token, of_line = adapted.of_token, adapted.of_token[batch.rows.logits_index]
    found = []
    for index, adapter in enumerate(adapted.adapters):
        if not adapter.changes_linears_only:
            rows = [np.flatnonzero(each == index) for each in (of_token, of_line)]
            (tokens, lines), _ = batch.uploads.send(IntegerArrays(rows, []))
            found.append(AdapterRows(adapter, tokens, lines))
    return found
