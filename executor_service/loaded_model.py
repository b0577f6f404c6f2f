"""A model that is ready to be run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from executor_service.kv_cache import LayerShape


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checked model on its device.

    `attention_modules` and `layers` are parallel, in the order of the forward pass: the modules
    that attend, and the keys and values that each stores per token. Token ids are 0 ..
    `vocab_size` - 1. `max_model_len` is in tokens. `layer_windows`: of each layer, how many tokens,
    itself included, a token attends to at most; None for all. `sliding_window`: the same of the
    whole model. `keeps_logits` says
    whether the model computes logits only where it is told to. `weights_bytes`: of all parameters
    and buffers, each counted once. `tokenizer_files` are those that exist.
    """

    model: nn.Module
    name: str
    architecture: str
    digest: str
    dtype: torch.dtype
    device: torch.device
    attention_modules: tuple[nn.Module, ...]
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    layer_windows: tuple[int | None, ...]
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    keeps_logits: bool
    weights_bytes: int
    tokenizer_files: tuple[Path, ...]

    @property
    def dtype_name(self) -> str:
        """Name in the handshake: "float32", "bfloat16" or "float16"."""
        return str(self.dtype).removeprefix("torch.")
