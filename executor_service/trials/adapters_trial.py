"""Trial of the kernels that add the low-rank updates of adapters.

Shape letters: T tokens, I inputs, O outputs of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from executor_service.errors import TrialFailed
from executor_service.model import AddLowRank
from executor_service.trials.trial import Trial
from splitserve_kernels.adapter_tiles import PackedSlot, SlotLinear, TokenTiles, lay_out_tiles
from splitserve_kernels.low_rank_update import LowRankUpdate

_NUM_TOKENS, _NUM_INPUTS, _MAX_RANK = 45, 520, 40
_SIZES = [200, 72]
# Slots with both parts of everything, with one part, and with none.
_RANKS: Sequence[Sequence[int | None]] = ((_MAX_RANK, 5), (None, 16), (None, None))
# Allowed error, in roundings of a typical number. Ranks and outputs are rounded.
_NUM_ROUNDINGS = 4
_MIN_TOLERANCE = 1e-5


@torch.inference_mode()
def try_low_rank(add: AddLowRank, dtype: torch.dtype, device: torch.device) -> None:
    """Adds random updates by `add` and in float64.

    Raises TrialFailed if results differ, or if tokens without an adapter change at all.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def update(rank: int, size: int, *, is_full: bool) -> LowRankUpdate:
        down, up = random(rank, _NUM_INPUTS) / _NUM_INPUTS**0.5, random(size, rank) / rank**0.5
        vectors = (random(size, dtype=torch.float32) for _ in range(2 * is_full))
        return LowRankUpdate(down, up, 1.5, *vectors)

    slots = [
        [
            None if rank is None else update(rank, size, is_full=slot == 0)
            for rank, size in zip(ranks, _SIZES, strict=True)
        ]
        for slot, ranks in enumerate(_RANKS)
    ]
    x, own = random(_NUM_TOKENS, _NUM_INPUTS), random(_NUM_TOKENS, sum(_SIZES))
    of_token = np.arange(_NUM_TOKENS, dtype=np.int32) % (len(slots) + 1) - 1
    packed = [PackedSlot(parts) for parts in slots]
    words = torch.stack([each.words for each in packed]).to(device)
    order, tiles = (torch.from_numpy(each).to(device) for each in lay_out_tiles(of_token))

    def added(bias: Tensor | None) -> Tensor:
        output = own.clone()
        add(x, output, TokenTiles(order, tiles), SlotLinear(words, tuple(_SIZES), _MAX_RANK), bias)
        return output

    def error_of(_bias: Tensor | None, expected: Tensor, actual: Tensor) -> float:
        is_plain = torch.from_numpy(of_token < 0).to(device)
        if not torch.equal(actual[is_plain], own[is_plain]):
            raise TrialFailed("tokens without an adapter have changed")
        return float(((actual.double() - expected).abs() / (1 + expected.abs())).max())

    Trial(
        reference=lambda bias: _added_in_float64(x, own, slots, of_token, bias),
        candidate=added,
        cases=(None, random(sum(_SIZES))),
        error_of=error_of,
        allowed=max(_MIN_TOLERANCE, _NUM_ROUNDINGS * torch.finfo(dtype).eps),
        complaint=lambda error: f"updates of adapters are off by {error:.2g}",
    ).run()


def _added_in_float64(
    x: Tensor,
    own: Tensor,
    slots: Sequence[Sequence[LowRankUpdate | None]],
    of_token: np.ndarray,
    bias: Tensor | None,
) -> Tensor:
    """Returns the outputs `own` [T, O] with the updates of the slots of `of_token` [T]."""
    result = own.double()
    bias = torch.zeros(own.shape[1], device=own.device) if bias is None else bias
    for slot, parts in enumerate(slots):
        rows = torch.from_numpy(np.flatnonzero(of_token == slot)).to(own.device)
        outputs = torch.split(result[rows], _SIZES, dim=1)
        changed = []
        for output, own_bias, update in zip(
            outputs, torch.split(bias.double(), _SIZES), parts, strict=True
        ):
            product = output - own_bias
            if update is not None:
                reduced = x[rows].double() @ update.down.double().T
                product = product + update.scale * reduced @ update.up.double().T
                product = product * (1 if update.gain is None else update.gain.double())
                product = product + (0 if update.bias is None else update.bias.double())
            changed.append(product + own_bias)
        result[rows] = torch.cat(changed, dim=1)
    return result
