"""What can be told from a configuration alone: which models cannot be served, and why.

These refusals come before the weights are read. What they miss, `model_trial.py` finds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from executor_service.errors import ModelUnsupported

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
