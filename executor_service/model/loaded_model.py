"""A model that is ready to be run.

Shape letters: Q sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.device.kv_cache import LayerShape
from executor_service.steps.executor_info import DefaultSampling, TokenizerFile
from splitserve_kernels.paged_batch import AttentionOptions, KVScales


@dataclass(frozen=True, slots=True)
class ExpectedLogits:
    """What a model said through paged attention: float32 `logits` [Q, L, V] of `tokens` [Q, L].

    `noise`: the relative error of its logits that its own rounding makes; 0 in float32.
    """

    tokens: Tensor
    logits: Tensor
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device that passed its trial.

    `kv_dtype`: what the pools hold keys and values in; `kv_scales`: what the numbers of each layer
    stand for there, none if for themselves.
    `attention_modules` and `layers` are parallel, in the order of the forward pass: the modules
    that attend, and the keys and values that each stores per token. Token ids are 0 ..
    `vocab_size` - 1. `max_model_len` is in tokens. `layer_options`: how each layer attends.
    `sliding_window`: how many tokens, itself included, a token of any layer attends to at most;
    None for all. `keeps_logits` says whether the model computes logits only where it is told to.
    `weights_bytes`: of all parameters and buffers, each counted once. `tokenizer_files`: as clients
    get them, by their names. `expected`: what replaces the model must say the same; None
    once that is settled. `default_sampling`: what the model's authors recommend.
    """

    model: nn.Module
    name: str
    architecture: str
    digest: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    attention_modules: tuple[nn.Module, ...]
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    layer_options: tuple[AttentionOptions, ...]
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    keeps_logits: bool
    weights_bytes: int
    tokenizer_files: Mapping[str, TokenizerFile]
    kv_scales: tuple[KVScales, ...] = ()
    expected: ExpectedLogits | None = None
    default_sampling: DefaultSampling = field(default_factory=DefaultSampling)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, as `sliding_window`."""
        return tuple(options.sliding_window for options in self.layer_options)

    @property
    def dtype_name(self) -> str:
        """Name in the handshake: "float32", "bfloat16" or "float16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_dtype_name(self) -> str:
        """Name in the handshake: that of `dtype`, or "float8_e4m3fn"."""
        return str(self.kv_dtype).removeprefix("torch.")


def weights_bytes(model: nn.Module) -> int:
    """Of all parameters and buffers; tied ones count once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers that attend alike have in common. `num_heads`: query heads."""

    layer: LayerShape
    num_heads: int
    options: AttentionOptions


def layer_kinds(loaded: LoadedModel) -> list[LayerKind]:
    """The kinds of layers of a model, each once (sinks may differ within a kind)."""
    config: Any = loaded.model.config
    num_heads = int(config.get_text_config(decoder=True).num_attention_heads)
    kinds = {}
    for layer, options in zip(loaded.layers, loaded.layer_options, strict=True):
        heads = max(num_heads // layer.num_kv_heads, 1) * layer.num_kv_heads
        numbers = (options.scale, options.sliding_window, options.softcap)
        kinds[layer, numbers, options.sinks is None] = LayerKind(layer, heads, options)
    return list(kinds.values())
