"""Rotary embeddings that are scaled for contexts longer than the training length.

YaRN scales the angles of all positions alike. LongRoPE and dynamic NTK, in `transformers`, choose
the angles by the longest sequence of the batch, which would change the meaning of cached keys. Here
the longest sequence that is allowed chooses them once, before the model is made.

Sources: Peng et al. 2023 (YaRN), Ding et al. 2024 (LongRoPE).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger(__name__)

_Parameters = dict[str, Any]


def scaled_positions(text_config: Any, num_positions: int) -> tuple[int, int]:  # noqa: ANN401
    """Returns the default and the largest number of positions of a model.

    `num_positions`: as its configuration says, which need not include the scaling. Dynamic NTK is
    used on request only, since answers within `num_positions` are better without it.
    """
    default = most = num_positions
    for rope in _rope_parameters(text_config):
        factor = rope.get("factor")
        if not isinstance(factor, (int, float)):
            continue
        if _rope_type(rope) == "yarn":
            scaled = int(factor * _original_positions(text_config, rope))
            default, most = max(default, scaled), max(most, scaled)
        elif _rope_type(rope) == "dynamic" and not rope.get("alpha"):
            most = max(most, int(factor * num_positions))
    return default, most


def fix_rope(text_config: Any, max_model_len: int) -> str | None:  # noqa: ANN401
    """Makes the angles of a model independent of the sequences in a batch.

    Up to the original length, `transformers` does not change them. Beyond it, the parameters in
    `text_config` are replaced by those that `transformers` uses for a sequence of `max_model_len`
    tokens. Returns a text that distinguishes the result from the published parameters; None if
    these are unchanged.
    """
    fixed = [
        _fix_long(text_config, rope, max_model_len)
        if _rope_type(rope) == "longrope"
        else _fix_dynamic(text_config, rope, max_model_len)
        for rope in _rope_parameters(text_config)
        if _rope_type(rope) in ("longrope", "dynamic")
    ]
    return " ".join(filter(None, fixed)) or None


def _fix_long(text_config: Any, rope: _Parameters, max_model_len: int) -> str | None:  # noqa: ANN401
    original = _original_positions(text_config, rope)
    # Phi-3.5-MoE also has a scale of attention for either length.
    names = [name for name in ("factor", "mscale") if f"long_{name}" in rope]
    is_same = all(rope.get(f"short_{name}") == rope[f"long_{name}"] for name in names)
    if max_model_len <= original or is_same:
        return None
    for name in names:
        rope[f"short_{name}"] = rope[f"long_{name}"]
    _log.warning(
        "long_rope_factors max_model_len=%d original_positions=%d: short sequences use the factors"
        " of long ones too, which can cost accuracy; --max-model-len %d or less uses the short"
        " factors",
        max_model_len,
        original,
        original,
    )
    return "long_rope_factors"


def _fix_dynamic(text_config: Any, rope: _Parameters, max_model_len: int) -> str | None:  # noqa: ANN401
    original = text_config.max_position_embeddings
    # A constant `alpha` (HunYuan) is another scaling of that name, which does not grow.
    if max_model_len <= original or rope.get("alpha"):
        return None
    head_dim = getattr(text_config, "head_dim", None)
    head_dim = head_dim or text_config.hidden_size // text_config.num_attention_heads
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    factor = rope.pop("factor")
    stretch = factor * max_model_len / original - (factor - 1)
    rope["rope_theta"] *= stretch ** (rotary_dim / (rotary_dim - 2))
    rope["rope_type"] = "default"
    rope.pop("type", None)
    _log.warning(
        "dynamic_rope_fixed max_model_len=%d original_positions=%d rope_theta=%.6g: short sequences"
        " use the angles of the longest too, which can cost accuracy; --max-model-len %d or less"
        " uses the original ones",
        max_model_len,
        original,
        rope["rope_theta"],
        original,
    )
    return f"rope_theta {rope['rope_theta']!r}"


def _original_positions(text_config: Any, rope: _Parameters) -> int:  # noqa: ANN401
    return int(
        rope.get("original_max_position_embeddings")
        or getattr(text_config, "original_max_position_embeddings", None)
        or text_config.max_position_embeddings
    )


def _rope_type(rope: _Parameters) -> str | None:
    return rope.get("rope_type", rope.get("type"))


def _rope_parameters(text_config: Any) -> Iterator[_Parameters]:  # noqa: ANN401
    """Yields the rotary parameters: one set, or one for each type of layer."""
    for attribute in ("rope_parameters", "rope_scaling"):
        parameters = getattr(text_config, attribute, None)
        if isinstance(parameters, dict):
            yield parameters
            yield from (value for value in parameters.values() if isinstance(value, dict))
