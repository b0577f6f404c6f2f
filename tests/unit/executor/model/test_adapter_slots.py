"""Slots of adapters: who has which, and what is written there."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.model import (
    AdaptedTokens,
    Adapter,
    AdapterLimits,
    AdapterSlots,
    Target,
)
from splitserve_kernels.adapter_tiles import SlotLinear, TokenTiles
from splitserve_kernels.low_rank_update import LowRankUpdate

NUM_INPUTS, NUM_OUTPUTS = 6, 10
TARGETS = [
    Target(f"layers.0.{name}", NUM_INPUTS, NUM_OUTPUTS)
    for name in ("q_proj", "k_proj", "o_proj", "gate_up_proj")
]


def _nothing(
    _x: Tensor, _out: Tensor, _tiles: TokenTiles, _slots: SlotLinear, _bias: object
) -> None:
    pass


def _slots(max_num: int = 2) -> AdapterSlots:
    layers = [TARGETS[:2], TARGETS[2:3], TARGETS[3:]]
    limits, cpu = AdapterLimits(max_num, 4), torch.device("cpu")
    return AdapterSlots(layers, limits, cpu, torch.float32, _nothing)


def _update(rank: int = 2) -> LowRankUpdate:
    return LowRankUpdate(torch.ones(rank, NUM_INPUTS), torch.ones(NUM_OUTPUTS, rank), 0.5)


def _adapter(name: str, **updates: LowRankUpdate) -> Adapter:
    return Adapter(name, {f"layers.0.{module}": update for module, update in updates.items()})


def test_slots_belong_to_adapters_as_long_as_these_live() -> None:
    slots = _slots(max_num=1)
    first, second = _adapter("a@1", q_proj=_update()), _adapter("b@2", o_proj=_update())
    taken = [slots.prepare(each) for each in (first, second, first)]
    assert taken[0] == taken[2] != taken[1]
    with pytest.raises(RuntimeError, match="all 2 slots of adapters are in use"):
        slots.prepare(_adapter("c@3", q_proj=_update()))

    del first
    gc.collect()

    assert slots.prepare(_adapter("c@3", q_proj=_update())) == taken[0]
    assert slots.prepare(second) == taken[1]


def test_slots_forget_what_the_adapter_before_had() -> None:
    slots = _slots(max_num=1)
    kept = _adapter("a@1")
    slots.prepare(kept)
    slot = slots.prepare(_adapter("b@2", q_proj=_update(), o_proj=_update(4)))
    gc.collect()
    other = _adapter("c@3", k_proj=_update(3))
    assert slots.prepare(other) == slot
    ranks = [slots.linears[layer].words[slot, :, 4].tolist() for layer in range(3)]
    assert ranks == [[0, 3], [0], [0]]


def test_slots_of_tokens_are_those_of_their_adapters() -> None:
    slots = _slots()
    adapters = tuple(_adapter(name, q_proj=_update()) for name in ("a@1", "b@2"))
    slots.prepare(adapters[1])
    tokens = AdaptedTokens(adapters, np.array([-1, 1, 0, 0, -1], np.int32))
    assert slots.slots_of(tokens).tolist() == [-1, 0, 1, 1, -1]


def test_prepare_names_the_layer_when_an_update_does_not_fit() -> None:
    slots = _slots()
    wide = replace(_update(), down=torch.ones(2, NUM_INPUTS + 1))
    biased = replace(_update(), bias=torch.ones(NUM_OUTPUTS - 1))
    for adapter, reason in (
        (_adapter("a", experts=_update()), "layers.0.experts: adapters cannot change it"),
        (_adapter("a", q_proj=wide), "layers.0.q_proj: the update has other sizes"),
        (_adapter("a", q_proj=biased), "layers.0.q_proj: the update has other sizes"),
        (_adapter("a", q_proj=_update(5)), "layers.0.q_proj: the rank is 5; allowed: at most 4"),
        (_adapter("a", gate_up_proj=_update(9)), "the rank is 9; allowed: at most 8"),
    ):
        with pytest.raises(ValueError, match=reason):
            slots.prepare(adapter)
    slots.prepare(_adapter("a", gate_up_proj=_update(8)))
