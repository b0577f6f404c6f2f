"""A model that is ready to be run.

Shape letters: Q sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from executor_service.device.kv_cache import LayerShape
from executor_service.errors import ModelUnsupported
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


# -- What can be told from a configuration alone: which models cannot be served, and why -----------
#
# These refusals come before the weights are read. What they miss, `model_trial.py` finds.

_DEFAULT_MODEL_LEN = 2048
# What configurations call the number of positions that a decoder has.
_NUM_POSITIONS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "n_positions",
    "n_ctx",
)
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_LAYER_TYPE_REASONS = {
    "chunked_attention": "chunked attention is not supported",
    "linear_attention": "linear attention keeps a recurrent state",
    "mamba": "mamba layers keep a recurrent state",
    "recurrent": "recurrent layers keep a state of their own",
    "conv": "convolution layers keep a state of their own",
    "hybrid": "hybrid layers keep a recurrent state",
}
_SERVED_INSTEAD = (
    "not served; served would be a model whose layers all attend, to everything or to a sliding"
    " window, through transformers' attention interface"
)
# Rotary embeddings whose frequencies depend on the longest position in the batch.
_GROWING_ROPE_TYPES = frozenset({"dynamic", "longrope"})


def choose_max_model_len(config: Any, requested: int | None) -> int:  # noqa: ANN401
    """Tokens one sequence may have. `config`: of `transformers`, text part.

    Raises ModelUnsupported if `requested` is more than the model has positions for.
    """
    limits = [getattr(config, name, None) for name in _NUM_POSITIONS]
    limit = min((each for each in limits if isinstance(each, int) and each > 0), default=None)
    if limit is None:
        return requested or _DEFAULT_MODEL_LEN
    if requested is not None and requested > limit:
        raise ModelUnsupported(
            f"{config.model_type}: --max-model-len {requested} is more than its {limit} positions"
        )
    return requested or limit


def check_config(config: Any, text_config: Any, max_model_len: int) -> None:  # noqa: ANN401
    """Raises ModelUnsupported, by name, for what the configuration rules out."""
    name = config.model_type
    for layer_type in _layer_types(text_config):
        if layer_type not in _SERVED_LAYER_TYPES:
            reason = _LAYER_TYPE_REASONS.get(layer_type, f"{layer_type} layers are not supported")
            raise ModelUnsupported(f"{name}: {reason}: {_SERVED_INSTEAD}")
    if getattr(text_config, "attention_chunk_size", None):
        reason = _LAYER_TYPE_REASONS["chunked_attention"]
        raise ModelUnsupported(f"{name}: {reason}: {_SERVED_INSTEAD}")
    for rope in _rope_parameters(text_config):
        _check_rope(name, rope, text_config, max_model_len)


def check_model_class(model_class: type) -> None:
    """Raises ModelUnsupported for a class that keeps state or attends in its own way."""
    name = model_class.__name__
    # Both attributes belong to transformers' own bookkeeping; where one is missing, the trial
    # after loading comes to the same verdict, only later.
    if getattr(model_class, "_is_stateful", False):
        raise ModelUnsupported(f"{name}: it keeps a recurrent state: {_SERVED_INSTEAD}")
    if _numbers_from_padding(model_class):
        reason = "its positions begin behind pad_token_id, not at 0"
        raise ModelUnsupported(f"{name}: {reason}: {_SERVED_INSTEAD}")
    uses_interface = getattr(model_class, "_can_set_attn_implementation", None)
    if uses_interface is not None and not uses_interface():
        reason = "it bypasses transformers' attention interface"
        raise ModelUnsupported(f"{name}: {reason}: {_SERVED_INSTEAD}")


def _numbers_from_padding(model_class: type) -> bool:
    """Whether it numbers tokens as RoBERTa does, whatever positions it might be given."""
    classes = vars(sys.modules[model_class.__module__]).values()
    return any("create_position_ids_from_input_ids" in getattr(c, "__dict__", {}) for c in classes)


def expected_windows(text_config: Any, num_layers: int) -> list[int | None]:  # noqa: ANN401
    """The sliding window of each attending layer, as far as the configuration says."""
    window = getattr(text_config, "sliding_window", None)
    if not getattr(text_config, "use_sliding_window", True):
        window = None
    layer_types = _layer_types(text_config)
    if len(layer_types) == num_layers:
        return [window if kind == "sliding_attention" else None for kind in layer_types]
    return [window] * num_layers


def _layer_types(text_config: Any) -> list[str]:  # noqa: ANN401
    for attribute in ("layer_types", "layers_block_type", "block_types"):
        layer_types = getattr(text_config, attribute, None)
        if isinstance(layer_types, (list, tuple)):
            return list(layer_types)
    return []


def _rope_parameters(text_config: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """The rotary parameters: one set, or one for each type of layer."""
    for attribute in ("rope_parameters", "rope_scaling"):
        parameters = getattr(text_config, attribute, None)
        if isinstance(parameters, dict):
            yield parameters
            yield from (value for value in parameters.values() if isinstance(value, dict))


def _check_rope(
    name: str,
    rope: dict[str, Any],
    text_config: Any,  # noqa: ANN401
    max_model_len: int,
) -> None:
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type not in _GROWING_ROPE_TYPES:
        return
    original = (
        rope.get("original_max_position_embeddings")
        or getattr(text_config, "original_max_position_embeddings", None)
        or text_config.max_position_embeddings
    )
    if max_model_len > original:
        raise ModelUnsupported(
            f"{name}: its {rope_type} rotary embedding changes for all sequences once one is longer"
            f" than {original} tokens; use --max-model-len {original} or less"
        )


# -- Progress of what may take long at the start ---------------------------------------------------

_DELAY_S = 1.0

_Item = TypeVar("_Item")


def show_progress(items: Sequence[_Item], what: str, delay_s: float = _DELAY_S) -> Iterable[_Item]:
    """Yields `items`; a bar on standard error counts them if it is a terminal.

    It appears after `delay_s`, and is gone at the end.
    """
    from tqdm import tqdm

    bar: Iterable[_Item] = tqdm(items, desc=what, disable=None, delay=delay_s, leave=False)
    return bar
