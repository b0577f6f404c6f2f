"""A loaded model and facts about it: layers, limits from its configuration, and load progress.

Shape letters: Q sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from executor_service.device import LayerShape
from executor_service.errors import ModelUnsupported
from executor_service.model.adapter import AdapterLimits, BaseTensor, Target, no_base_tensor
from executor_service.model.encoder_decoder import REPLACED_ATTENTION, EncoderDecoder
from executor_service.model.pooling import VectorParts
from executor_service.model.rope_scaling import scaled_positions
from executor_service.steps import AudioInfo, DefaultSampling, ModelVectors, TokenizerFile
from splitserve_kernels.paged_batch import AttentionOptions, KVScales


@dataclass(frozen=True, slots=True)
class ExpectedLogits:
    """Logits of a model through paged attention: float32 `logits` [Q, L, V] of `tokens` [Q, L].

    `noise`: relative error of the logits through the model's own rounding; 0 in float32.
    """

    tokens: Tensor
    logits: Tensor
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device that passed its trial.

    `kv_dtype`: dtype of keys and values in the pools. `kv_scales`: scales of each layer's stored
    keys and values; empty if they are stored unscaled. Those of 8-bit pools of a CPU are in slots.
    `attention_modules` and `layers` are parallel, in the order of the forward pass: the modules
    that attend, and the shape of the keys and values that each stores per token. Token ids are 0 ..
    `vocab_size` - 1. `max_model_len`: tokens. `layer_options`: attention options of each layer.
    `sliding_window`: most tokens, itself included, that a token of any layer attends to; None for
    no limit. `keeps_logits`: the model can compute logits of chosen tokens only. `weights_bytes`:
    bytes of all parameters and buffers, each counted once. `tokenizer_files`: files for clients, by
    name. `expected`: logits that a replacement of the model must reproduce; None once the choice of
    a replacement is final. `default_sampling`: recommendation of the model's authors.
    `quantization`: format in which the checkpoint has its weights quantised; None for plain ones.
    `adapter_targets`: layers that an adapter may change, by name. `adapter_limits`: of loaded
    adapters; None if none are served, or without limits. `decoder_token_ids`: with which the
    decoder of an encoder-decoder model begins; empty for other models. `base_tensor`: reads the
    checkpoint. `vectors`: what the model returns in place of tokens; None for a model that returns
    tokens. `vector_parts`: present with `vectors`.
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
    quantization: str | None = None
    adapter_targets: Mapping[str, Target] = field(default_factory=dict)
    adapter_limits: AdapterLimits | None = None
    decoder_token_ids: tuple[int, ...] = ()
    base_tensor: BaseTensor = no_base_tensor
    vectors: ModelVectors | None = None
    vector_parts: VectorParts | None = None

    @property
    def num_outputs(self) -> int:
        """Numbers that the model computes for a token: its logits, or what vectors are made of."""
        return self.vocab_size if self.vector_parts is None else self.vector_parts.output_size

    @property
    def has_encoder(self) -> bool:
        """Whether tokens attend to those of an encoder."""
        return isinstance(self.model, EncoderDecoder)

    @property
    def audio(self) -> AudioInfo | None:
        """Audio features that the encoder takes; None for other models."""
        return self.model.audio if isinstance(self.model, EncoderDecoder) else None

    @property
    def max_encoder_tokens(self) -> int | None:
        """Limit of encoder tokens in a row; None without a limit or an encoder."""
        return self.model.max_encoder_tokens if isinstance(self.model, EncoderDecoder) else None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens, as in `sliding_window`."""
        return tuple(options.sliding_window for options in self.layer_options)

    @property
    def dtype_name(self) -> str:
        """Name in the handshake: "float32", "bfloat16" or "float16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_slot_scales(self) -> bool:
        """Whether each token and head has a scale in the pools (KVScales)."""
        return any(scales.in_slots for scales in self.kv_scales)

    @property
    def kv_dtype_name(self) -> str:
        """Name in the handshake: that of `dtype`, "int8" or "float8_e4m3fn"."""
        return str(self.kv_dtype).removeprefix("torch.")


def weights_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters and buffers; tied ones count once.

    Weights that are still in their files do not count.
    """
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Common properties of layers that attend alike. `num_heads`: query heads."""

    layer: LayerShape
    num_heads: int
    options: AttentionOptions


def layer_kinds(loaded: LoadedModel) -> list[LayerKind]:
    """Returns the kinds of layers of a model, each once (sinks may differ within a kind)."""
    config: Any = loaded.model.config
    num_heads = int(config.get_text_config(decoder=True).num_attention_heads)
    kinds = {}
    for layer, options in zip(loaded.layers, loaded.layer_options, strict=True):
        heads = max(num_heads // layer.num_kv_heads, 1) * layer.num_kv_heads
        numbers = (options.scale, options.sliding_window, options.softcap)
        kinds[layer, numbers, options.sinks is None] = LayerKind(layer, heads, options)
    return list(kinds.values())


# -- Checks of configurations ----------------------------------------------------------------------
#
# They refuse models before the weights are read. `model_trial.py` finds what they miss.

_DEFAULT_MODEL_LEN = 2048
# Names in configurations for the number of positions of a decoder.
_NUM_POSITIONS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_decoder_position_embeddings",
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
# A function, or a method of a class, in the modules of such models.
_NUMBERING = "create_position_ids_from_input_ids"
_SERVED_INSTEAD = (
    "not served; supported: a model whose layers all use full or sliding-window attention through"
    " transformers' attention interface"
)


def choose_max_model_len(config: Any, requested: int | None) -> int:  # noqa: ANN401
    """Returns the most tokens of a sequence. `config`: text configuration of `transformers`.

    Raises ModelUnsupported if `requested` exceeds the positions of the model.
    """
    limits = [getattr(config, name, None) for name in _NUM_POSITIONS]
    limit = min((each for each in limits if isinstance(each, int) and each > 0), default=None)
    if limit is None:
        return requested or _DEFAULT_MODEL_LEN
    default, most = scaled_positions(config, limit)
    if requested is not None and requested > most:
        raise ModelUnsupported(
            f"{config.model_type}: --max-model-len is {requested}; allowed: at most {most}"
        )
    return requested or default


def check_config(config: Any, text_config: Any) -> None:  # noqa: ANN401
    """Raises ModelUnsupported, with the reason by name, if the configuration rules out serving."""
    name = config.model_type
    for layer_type in _layer_types(text_config):
        if layer_type not in _SERVED_LAYER_TYPES:
            reason = _LAYER_TYPE_REASONS.get(layer_type, f"{layer_type} layers are not supported")
            raise ModelUnsupported(f"{name}: {reason}: {_SERVED_INSTEAD}")
    if getattr(text_config, "attention_chunk_size", None):
        reason = _LAYER_TYPE_REASONS["chunked_attention"]
        raise ModelUnsupported(f"{name}: {reason}: {_SERVED_INSTEAD}")


def check_model_class(model_class: type, *, counts_positions: bool = True) -> None:
    """Raises ModelUnsupported for a class that keeps state or attends in its own way.

    `counts_positions`: whether its own code counts the positions of tokens.
    """
    name = model_class.__name__
    # Both attributes are internal to transformers; without them the trial after loading refuses
    # the model, only later.
    if getattr(model_class, "_is_stateful", False):
        raise ModelUnsupported(f"{name}: keeps a recurrent state: {_SERVED_INSTEAD}")
    if counts_positions and numbers_from_padding(model_class):
        reason = "positions start after pad_token_id, not at 0"
        raise ModelUnsupported(f"{name}: {reason}: {_SERVED_INSTEAD}")
    uses_interface = getattr(model_class, "_can_set_attn_implementation", None)
    if uses_interface is not None and not uses_interface() and name not in REPLACED_ATTENTION:
        reason = "bypasses transformers' attention interface"
        raise ModelUnsupported(f"{name}: {reason}: {_SERVED_INSTEAD}")


def numbers_from_padding(model_class: type) -> bool:
    """Returns whether the class numbers tokens as RoBERTa does, ignoring given positions."""
    module = sys.modules[model_class.__module__]
    owners = (module, *vars(module).values())
    return any(_NUMBERING in getattr(owner, "__dict__", {}) for owner in owners)


def expected_windows(text_config: Any, num_layers: int) -> list[int | None]:  # noqa: ANN401
    """Returns the sliding window of each attending layer, as far as the configuration says."""
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


# -- Progress bars of the start --------------------------------------------------------------------

_DELAY_S = 1.0

_Item = TypeVar("_Item")


def show_progress(items: Sequence[_Item], what: str, delay_s: float = _DELAY_S) -> Iterable[_Item]:
    """Yields `items`, counted by a progress bar if standard error is a terminal.

    The bar appears after `delay_s` and disappears at the end.
    """
    from tqdm import tqdm

    bar: Iterable[_Item] = tqdm(items, desc=what, disable=None, delay=delay_s, leave=False)
    return bar
