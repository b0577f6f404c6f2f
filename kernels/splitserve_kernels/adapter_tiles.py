"""Inputs of the GPU's low-rank kernels: tiles of tokens, and where the matrices of adapters are.

Each loaded adapter has a slot. What a slot holds is written to device memory that stays where it
is, so recorded steps find other adapters there later. Imports no Triton.

Shape letters: T tokens, N tiles, S slots, P parts of a fused layer, I inputs of a layer, O outputs
of a part, r rank, W rank rounded up to a multiple of RANK_MULTIPLE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from splitserve_kernels.low_rank_update import LowRankUpdate

Int32Array = npt.NDArray[np.int32]

# Tokens of a tile. Fixed, so that the bits of a row depend on no other row.
TILE_SIZE = 16
RANK_MULTIPLE = 16
# Words of a part in a slot: addresses of `down`, `up`, gain and bias, rank, bits of the scale.
NUM_WORDS = 6
# Alignment of matrices in bytes, on which the kernels rely.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """Tokens of a pass that have an adapter, in tiles of one slot each.

    `order`: [T] int32, tokens by slot; as many as have one are meant. `tiles`: [3, N] int32, slot,
    first place in `order` and number of tokens of each tile; 0 tokens in a tile that is not used.
    """

    order: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class SlotLinear:
    """Updates of a linear layer in all slots; a fused layer has several parts, at most 3.

    `words`: [S, P, NUM_WORDS] int64, see `PackedSlot`; only stride(0) is free. `sizes`: outputs of
    each part. `max_rank`: of any update.
    """

    words: Tensor
    sizes: tuple[int, ...]
    max_rank: int


class PackedSlot:
    """Content of a slot: addresses of an adapter's matrices, which this object keeps in memory."""

    def __init__(self, updates: Sequence[LowRankUpdate | None]) -> None:
        """Packs the `updates` of the parts of all layers; None for an unchanged part."""
        self._kept: list[Tensor] = []
        # [parts, NUM_WORDS] int64. All words are 0 where the adapter changes nothing; the address
        # of a gain or bias is 0 for none.
        self.words = torch.zeros(len(updates), NUM_WORDS, dtype=torch.int64)
        for index, update in enumerate(updates):
            if update is not None:
                self.words[index] = torch.tensor(self._words_of(update))

    def _words_of(self, update: LowRankUpdate) -> list[int]:
        rank = len(update.down)
        # [O, W]: whole rows of columns can be loaded at once.
        up = functional.pad(update.up, (0, -rank % RANK_MULTIPLE))
        addresses = [self._address(t) for t in (update.down, up, update.gain, update.bias)]
        return [*addresses, rank, int(np.float32(update.scale).view(np.int32))]

    def _address(self, matrix: Tensor | None) -> int:
        if matrix is None:
            return 0
        if not matrix.is_contiguous() or matrix.data_ptr() % _ALIGNMENT:
            matrix = matrix.clone(memory_format=torch.contiguous_format)
        self._kept.append(matrix)
        return matrix.data_ptr()


def most_tiles(num_tokens: int, num_slots: int) -> int:
    """Returns the most tiles that `num_tokens` tokens of at most `num_slots` slots can have."""
    return (num_tokens + (TILE_SIZE - 1) * min(num_slots, num_tokens)) // TILE_SIZE


def lay_out_tiles(
    slot_of_token: Int32Array, num_places: int | None = None, num_tiles: int | None = None
) -> tuple[Int32Array, Int32Array]:
    """Returns `order` and `tiles` of `TokenTiles` on the host.

    `slot_of_token`: [T], -1 for none. `num_places`, `num_tiles`: sizes of the results; None for as
    many as are needed.
    """
    tokens = np.flatnonzero(slot_of_token >= 0)
    tokens = tokens[np.argsort(slot_of_token[tokens], kind="stable")]
    slots, starts, counts = np.unique(slot_of_token[tokens], return_index=True, return_counts=True)
    tiles_of_slot = -(-counts // TILE_SIZE)
    num_used = int(tiles_of_slot.sum())
    first = np.cumsum(tiles_of_slot) - tiles_of_slot
    begun = TILE_SIZE * (np.arange(num_used) - np.repeat(first, tiles_of_slot))
    order = np.zeros(len(tokens) if num_places is None else num_places, np.int32)
    order[: len(tokens)] = tokens
    tiles = np.zeros((3, num_used if num_tiles is None else num_tiles), np.int32)
    tiles[0, :num_used] = np.repeat(slots, tiles_of_slot)
    tiles[1, :num_used] = np.repeat(starts, tiles_of_slot) + begun
    tiles[2, :num_used] = np.minimum(np.repeat(counts, tiles_of_slot) - begun, TILE_SIZE)
    return order, tiles
