"""A small configuration of any model type that `transformers` has a language model for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ORIGINAL_POSITIONS = 40

# By the names that configurations have for them. What a default is None for stays None, but for
# the last group.
_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim",), 64),
    **dict.fromkeys(("intermediate_size", "d_inner", "ffn_dim", "d_ff", "n_inner"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_nextn_predict_layers": 0,
    "vocab_size": 160,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Far larger than usual, see tiny_models.py.
    "initializer_range": 0.3,
    "init_std": 0.3,
    # Boundaries, so near that a prompt passes them.
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 96),
    "max_target_positions": 96,
    "sliding_window": 12,
    "attention_chunk_size": 16,
    "floor_scale": 24,
    "original_max_position_embeddings": ORIGINAL_POSITIONS,
}
_EVEN_IF_NONE: Mapping[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
# Of parts for images and sounds.
_MEDIA_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "projection_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    "intermediate_size": 96,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.02,
}
_MEDIA = ("vision", "audio", "vq", "speech")
# Text parts whose positions have a time, a height and a width, which they are not told by default.
_WHOLE_HEADS, _HALF_HEADS = [2, 3, 3], [1, 1, 2]
_SECTIONS: Mapping[str, list[int]] = {
    "ernie4_5_vl_moe_text": _WHOLE_HEADS,
    "glm4v_text": _WHOLE_HEADS,
    "glm4v_moe_text": _HALF_HEADS,
    "glm_ocr_text": _HALF_HEADS,
    "paddleocr_vl_text": _WHOLE_HEADS,
    "qwen2_vl_text": _WHOLE_HEADS,
    "qwen2_5_vl_text": _WHOLE_HEADS,
    "qwen2_5_omni_text": _WHOLE_HEADS,
}
# What these need besides.
_BESIDES: Mapping[str, Mapping[str, Any]] = {
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {"residual_multiplier": 0.95},
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk_config(model_type: str, overrides: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
    """Raises whatever a configuration raises that is not made this way."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    base = config_class()
    options = _shrunk_options(base, "")
    return config_class(**{**options, **_BESIDES.get(model_type, {}), **(overrides or {})})


def _shrunk_options(base: Any, part: str) -> dict[str, Any]:  # noqa: ANN401
    """Options of a small configuration like `base`, which is the `part` of another, or none."""
    settings = vars(base)
    inner = getattr(type(base), "sub_configs", {})
    parts = {
        name: _shrunk_options(settings[name], name)
        for name in inner
        if settings.get(name) is not None
    }
    if part.startswith(_MEDIA):
        return {n: size for n, size in _MEDIA_SIZES.items() if settings.get(n) is not None} | parts
    options = {n: size for n, size in _SIZES.items() if settings.get(n) is not None}
    if "is_decoder" in settings:
        options["is_decoder"] = True
    options |= {name: size for name, size in _EVEN_IF_NONE.items() if name in settings}
    if "kv_lora_rank" in settings:
        # Keys and values are made of one compressed vector for each query head.
        options["num_key_value_heads"] = options.get("num_attention_heads", 4)
        if "head_dim" in options:
            options["head_dim"] = options.get("qk_rope_head_dim", 8)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(settings.get(name), dict):
            options[name] = _nearer(settings[name])
            if "mrope_section" in settings[name]:
                options[name]["mrope_section"] = _WHOLE_HEADS
    if base.model_type in _SECTIONS:
        sections = _SECTIONS[base.model_type]
        options["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": sections,
        }
    if part:
        # Nothing is said of it but its type where that is not the only one that may be there.
        options |= {"model_type": base.model_type, **_BESIDES.get(base.model_type, {})}
    return options | parts


def _nearer(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters with boundaries as near as those of the rest."""
    return {
        name: _nearer(setting) if isinstance(setting, dict) else _SIZES.get(name, setting)
        for name, setting in rope.items()
    }
