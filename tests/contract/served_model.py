"""A tiny random model as a backend; its truth comes from `transformers` itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.model import LoadedModel
from executor_service.runner import CacheConfig, build_runner
from tests.contract.served import (
    BLOCK_SIZE,
    BROKEN_TOKEN,
    NAN_TOKEN,
    NUM_DEVICE_BLOCKS,
    NUM_HOST_BLOCKS,
    OUT_OF_MEMORY_TOKEN,
    VOCAB_SIZE,
    Backend,
)
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.models import tiny_models
from tests.support.models.model_pair import load_reference


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The model to serve, and an untouched one to ask."""

    loaded: LoadedModel
    plain: Any


def load_tiny_model(
    architecture: str, directory: Path, overrides: Mapping[str, Any] | None = None
) -> TinyModel:
    """Makes and loads the model; NAN_TOKEN and the others misbehave from now on."""
    assert tiny_models.VOCAB_SIZE == VOCAB_SIZE
    path = tiny_models.make_tiny_model(architecture, directory / architecture, overrides=overrides)
    loaded = load_model(ModelConfig(str(path)))
    embeddings: Any = loaded.model.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        embeddings.weight[NAN_TOKEN] = torch.nan
    embeddings.register_forward_pre_hook(_misbehave)
    return TinyModel(loaded, load_reference(path))


def make_model_backend(tiny: TinyModel, *, is_late: bool = False) -> Backend:
    """A backend with pools of its own; it takes the model over from the one made before.

    `is_late`: its steps are done some time after they have begun, as on a GPU.
    """
    cache_config = CacheConfig(
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_DEVICE_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
    )

    def next_token(tokens: Sequence[int]) -> int:
        with torch.inference_mode():
            logits = tiny.plain(input_ids=torch.tensor([list(tokens)])).logits
        return int(logits[0, -1].argmax())

    if is_late:
        runner = late_runner(tiny.loaded, cache_config, LateStreams())
    else:
        runner = build_runner(tiny.loaded, cache_config)
    return Backend(
        runner,
        VOCAB_SIZE,
        next_token,
        sliding_window=tiny.loaded.sliding_window,
    )


def _misbehave(_module: object, inputs: tuple[torch.Tensor, ...]) -> None:
    if (inputs[0] == OUT_OF_MEMORY_TOKEN).any():
        raise torch.OutOfMemoryError("no memory, says the test")
    if (inputs[0] == BROKEN_TOKEN).any():
        raise ValueError("this token breaks the model, says the test")
