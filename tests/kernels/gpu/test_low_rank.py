"""Low-rank updates on GPUs against plain torch, and the bits of rows beside others.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.adapter_tiles import (
    NUM_WORDS,
    TILE_SIZE,
    PackedSlot,
    SlotLinear,
    TokenTiles,
    lay_out_tiles,
    most_tiles,
)
from splitserve_kernels.gpu.low_rank import add_low_rank
from splitserve_kernels.low_rank_update import LowRankUpdate

# The last bit of each dtype, of ranks and of outputs.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
SIZES = (40, 24, 136)
NUM_INPUTS = 72
MAX_RANK = 32


def _random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


@dataclass(frozen=True, slots=True)
class Layer:
    """A fused layer of some parts and the updates of each slot."""

    slots: Sequence[Sequence[LowRankUpdate | None]]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    num_inputs: int = NUM_INPUTS
    max_rank: int = MAX_RANK

    def linear(self) -> tuple[SlotLinear, list[PackedSlot]]:
        """The slots in memory that has others beside this layer, and what keeps them."""
        packed = [PackedSlot(updates) for updates in self.slots]
        table = torch.full((len(packed), len(self.sizes) + 3, NUM_WORDS), -1, dtype=torch.int64)
        for slot, each in enumerate(packed):
            table[slot, 2:-1] = each.words
        words = table.to(self.device)[:, 2:-1]
        return SlotLinear(words, self.sizes, self.max_rank), packed

    def outputs(
        self, x: Tensor, own: Tensor, slot_of_token: Sequence[int], bias: Tensor | None = None
    ) -> Tensor:
        """Changed outputs `own` [T, O] of `x` [T, I]."""
        linear, _kept = self.linear()
        order, tiles = lay_out_tiles(np.array(slot_of_token, np.int32))
        output = own.clone()
        add_low_rank(x, output, _on(self.device, order, tiles), linear, bias)
        return output

    def expected(
        self, x: Tensor, own: Tensor, slot_of_token: Sequence[int], bias: Tensor | None = None
    ) -> Tensor:
        """The same in float64, token by token."""
        changed = own.double().clone()
        for token, slot in enumerate(slot_of_token):
            starts = np.cumsum([0, *self.sizes])
            for part, start, size in zip(self.slots[slot], starts, self.sizes, strict=False):
                if slot >= 0 and part is not None:
                    outputs = slice(int(start), int(start) + size)
                    own_bias = 0.0 if bias is None else bias[outputs].double()
                    product = changed[token, outputs] - own_bias
                    product += part.scale * (
                        part.up.double() @ (part.down.double() @ x[token].double())
                    )
                    product *= 1.0 if part.gain is None else part.gain.double()
                    added = 0.0 if part.bias is None else part.bias.double()
                    changed[token, outputs] = product + own_bias + added
        return changed


def _on(device: torch.device, order: np.ndarray, tiles: np.ndarray) -> TokenTiles:
    return TokenTiles(torch.from_numpy(order).to(device), torch.from_numpy(tiles).to(device))


def _update(
    seed: int,
    rank: int,
    num_outputs: int,
    layer: Layer,
    *,
    has_bias: bool = False,
    has_gain: bool = False,
) -> LowRankUpdate:
    down = _random(seed, rank, layer.num_inputs) / layer.num_inputs**0.5
    up = _random(seed + 1, num_outputs, rank) / rank**0.5
    return LowRankUpdate(
        down.to(layer.device, layer.dtype),
        up.to(layer.device, layer.dtype),
        0.5 + seed % 3,
        _random(seed + 2, num_outputs).to(layer.device) if has_bias else None,
        1 + _random(seed + 3, num_outputs).to(layer.device) / 4 if has_gain else None,
    )


def _layer(dtype: torch.dtype, device: torch.device) -> Layer:
    """Four slots: one of everything, one of a single part, one of nothing, one of odd ranks."""
    layer = Layer((), SIZES, dtype, device)
    return replace(
        layer,
        slots=(
            [
                _update(10 + i, 16, size, layer, has_bias=i != 1, has_gain=i != 0)
                for i, size in enumerate(SIZES)
            ],
            [None, _update(20, 8, SIZES[1], layer), None],
            [None, None, None],
            [_update(30 + i, rank, SIZES[i], layer) for i, rank in enumerate((1, 19, 32))],
        ),
    )


def _problem(layer: Layer, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """`x`, outputs before, and the layer's own bias."""
    num_outputs = sum(layer.sizes)
    shapes = ((num_tokens, layer.num_inputs), (num_tokens, num_outputs), (num_outputs,))
    x, own, bias = (
        _random(i, *shape).to(layer.device, layer.dtype) for i, shape in enumerate(shapes)
    )
    return x, own, bias


def _slots(num_tokens: int) -> list[int]:
    return [(7 * token) % 5 - 1 for token in range(num_tokens)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_add_low_rank_adds_what_torch_adds(
    dtype: torch.dtype, has_bias: bool, device: torch.device
) -> None:
    layer = _layer(dtype, device)
    x, own, bias = _problem(layer, 45)
    given = bias if has_bias else None
    actual = layer.outputs(x, own, _slots(45), given)
    expected = layer.expected(x, own, _slots(45), given)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_add_low_rank_keeps_the_bits_of_a_row_whatever_is_beside_it(
    dtype: torch.dtype, device: torch.device
) -> None:
    layer = _layer(dtype, device)
    x, own, bias = _problem(layer, 45)
    together = layer.outputs(x, own, _slots(45), bias)
    for tokens in ([44], [3, 9], list(range(20, 45)), list(range(44, -1, -1))):
        slots = [_slots(45)[token] for token in tokens]
        apart = layer.outputs(x[tokens], own[tokens], slots, bias)
        assert torch.equal(apart, together[tokens])


def test_add_low_rank_does_not_touch_rows_without_adapter(device: torch.device) -> None:
    layer = _layer(torch.bfloat16, device)
    x, own, bias = _problem(layer, 45)
    own[5] = torch.nan
    slots = [-1 if token % 3 == 2 else 3 for token in range(45)]
    changed = (layer.outputs(x, own, slots, bias) != own).any(dim=1)
    assert changed[own.isfinite().all(dim=1)].tolist() == [
        slot >= 0 for token, slot in enumerate(slots) if token != 5
    ]
    assert bool(layer.outputs(x, own, slots, bias)[6].isfinite().all())


@pytest.mark.parametrize("num_inputs", [256, 257, 5000])
def test_add_low_rank_takes_many_inputs_and_ranks(num_inputs: int, device: torch.device) -> None:
    layer = Layer((), (50,), torch.float32, device, num_inputs, max_rank=192)
    updates = [[_update(seed, rank, 50, layer)] for seed, rank in ((1, 192), (2, 65), (3, 64))]
    layer = replace(layer, slots=updates)
    x, own, _ = _problem(layer, 5)
    slots = [0, 1, 2, -1, 1]
    actual, expected = layer.outputs(x, own, slots), layer.expected(x, own, slots)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


def test_add_low_rank_leaves_out_tiles_that_are_not_used(device: torch.device) -> None:
    layer = _layer(torch.float32, device)
    x, own, _ = _problem(layer, 40)
    slots = np.array(_slots(40), np.int32)
    linear, _kept = layer.linear()
    outputs = []
    for sizes in ((None, None), (64, most_tiles(64, 4))):
        order, tiles = lay_out_tiles(slots, *sizes)
        outputs.append(own.clone())
        add_low_rank(x, outputs[-1], _on(device, order, tiles), linear)
    assert torch.equal(*outputs)


def test_add_low_rank_changes_nothing_when_no_token_has_an_adapter(device: torch.device) -> None:
    layer = _layer(torch.float32, device)
    x, own, _ = _problem(layer, 3)
    assert torch.equal(layer.outputs(x, own, [-1, -1, -1]), own)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_tiles_hold_each_token_once_when_they_are_laid_out(num_tokens: int, num_slots: int) -> None:
    generator = np.random.default_rng(num_tokens)
    for _ in range(20):
        slots = generator.integers(-1, num_slots, num_tokens).astype(np.int32)
        order, tiles = lay_out_tiles(slots)
        seen: dict[int, int] = {}
        for slot, start, count in tiles.T.tolist():
            assert 0 < count <= TILE_SIZE
            seen.update((token, slot) for token in order[start : start + count].tolist())
        assert seen == {token: slot for token, slot in enumerate(slots.tolist()) if slot >= 0}
        assert tiles[2].sum() == len(seen)
        assert tiles.shape[1] <= most_tiles(num_tokens, num_slots)


def test_most_tiles_are_needed_when_each_slot_begins_one() -> None:
    slots = np.array([0] * 17 + [1] * 17 + [2], np.int32)
    assert lay_out_tiles(slots)[1].shape[1] == most_tiles(len(slots), 3) == 5
