"""What was chosen to compute a model with."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from executor_service.device.kv_cache import CopyBlocks, copy_in_torch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel
from executor_service.sampling.sampler import Adjust, Draw, adjust_in_torch, draw_in_torch
from executor_service.sampling.static_draw import StaticDraw

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compute:
    """`make_model` makes what runs `loaded`, `draw` chooses tokens. `description`: for people.

    `adjust` changes logits before tokens are chosen.

    `block_size`: tokens of a KV block. `copy_blocks`: copies them within the device pool.
    `is_batch_invariant`: a sequence's logits are the same bits whatever shares its batch, and
    however its tokens are cut into steps. `is_int8`: matrices are rounded to 8 bits.
    `is_recordable`: CUDA graphs can record its steps. `static_draw`: what draws in these; None if
    nothing does.
    """

    loaded: LoadedModel
    make_model: MakeModel
    description: str
    block_size: int
    draw: Draw = draw_in_torch
    copy_blocks: CopyBlocks = copy_in_torch
    is_batch_invariant: bool = False
    is_int8: bool = False
    is_recordable: bool = False
    adjust: Adjust = adjust_in_torch
    static_draw: StaticDraw | None = None


def log_not_used(what: str, loaded: LoadedModel, reason: str, instead: str) -> None:
    """One line, not urgent: `what` is not made for the model, which is served well without it."""
    _log.info(
        "%s_not_used model=%s reason=%r: %s serves", what, loaded.architecture, reason, instead
    )
