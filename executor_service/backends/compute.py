"""Result of the choice of code for a model, and log lines for code that is not the fastest."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from executor_service.decoders import NativeModel, unknown_fields
from executor_service.device import CopyBlocks, copy_in_torch
from executor_service.errors import TrialFailed
from executor_service.model import LoadedModel, MakeModel
from executor_service.sampling import Adjust, Draw, StaticDraw, adjust_in_torch, draw_in_torch

_log = logging.getLogger(__name__)

# Price of slower code compared with our own decoder; CPU figures were measured on two cores.
PRICE_OF_TORCH_ON_CPU = "a step takes 2.5 times as long with one row, and 11 times or more with 16"
PRICE_OF_TORCH_FOR_TEXTS = "a short text takes 1.4 times as long, many texts 1.2 times"
PRICE_OF_NO_DECODER = "a step takes about 2.5 times as long, and --deterministic is unavailable"
PRICE_OF_TORCH_ON_GPU = "attention runs row by row, and steps are not recorded in CUDA graphs"
PRICE_OF_NO_GPU_DECODER = "a layer launches about 38 kernels instead of 9 or 10"
PRICE_OF_NO_PACKED_MATRICES = "weights are dequantised, and take 16 bits each"


@dataclass(frozen=True, slots=True)
class Compute:
    """Code that runs a model. `make_model` creates the model that runs `loaded`.

    `draw` chooses tokens, after `adjust` has changed the logits. `description`: for people.
    `block_size`: tokens of a KV block. `copy_blocks`: copies blocks within the device pool.
    `is_batch_invariant`: a sequence's logits have the same bits whatever shares its batch, and
    however its tokens are cut into steps. `is_int8`: matrices are rounded to 8 bits.
    `is_recordable`: CUDA graphs can record the steps. `static_draw`: draws tokens in these
    recordings; None for no draws there. `why_slow`: reason why `loaded` does not run in the fastest
    code for its class of models and its device; None if it does. `native`: the native decoder; None
    for other code.
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
    why_slow: str | None = None
    native: NativeModel | None = None


def log_decoder_refused(what: str, loaded: LoadedModel, error: TrialFailed, price: str) -> str:
    """Logs that the `what` decoder failed its trial on `loaded`, and at what price.

    Returns the reason. It is an error of the decoder, unless the configuration has unknown fields:
    then the decoder was not made for the model, and a warning is logged.
    """
    unknown = unknown_fields(vars(loaded.model.config))
    shown = ", ".join(f"{name} = {setting!r}" for name, setting in unknown.items())
    reason = f"{error}; unknown configuration fields: {shown}" if unknown else str(error)
    level = logging.WARNING if unknown else logging.ERROR
    message = "%s_decoder_refused model=%s reason=%r price=%r"
    _log.log(level, message, what, loaded.architecture, reason, price)
    return reason


def log_matrices_refused(loaded: LoadedModel, error: Exception, price: str) -> None:
    """Logs that a model with packed matrices failed its trial, and at what price.

    Without a compiler there was no trial.
    """
    level = logging.ERROR if isinstance(error, TrialFailed) else logging.WARNING
    refused = "packed_matrices_refused model=%s reason=%r price=%r"
    _log.log(level, refused, loaded.architecture, str(error), price)


def log_not_used(what: str, loaded: LoadedModel, reason: str, instead: str) -> None:
    """Logs at INFO that `what` is not made for the model, and that `instead` serves it."""
    _log.info(
        "%s_not_used model=%s reason=%r: using %s", what, loaded.architecture, reason, instead
    )
