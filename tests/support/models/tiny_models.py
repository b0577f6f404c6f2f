"""Tiny checkpoints of many architectures, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from executor_service.engine_loader import LoadedEngine
    from executor_service.model import LoadedModel

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
    # Far fewer tokens than inputs have.
    "led": {"attention_window": 8},
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


VOCAB_SIZE = 160
EOS_TOKEN_ID = 2
MAX_POSITION_EMBEDDINGS = 512
SLIDING_WINDOW = 12

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    # Far larger than usual: the logits of such a model are peaked, so greedy choices do not tie.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True, slots=True)
class _Recipe:
    """`config_class`: name in `transformers`. `options`: on top of the common ones."""

    config_class: str
    options: Mapping[str, Any]
    without: tuple[str, ...] = ()


_RECIPES: Mapping[str, _Recipe] = {
    "llama": _Recipe("LlamaConfig", {}),
    "qwen2": _Recipe("Qwen2Config", {}),
    "qwen3": _Recipe("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": _Recipe(
        "Qwen3MoeConfig", {"head_dim": 16, "moe_intermediate_size": 32, **_EXPERTS}
    ),
    "mistral": _Recipe("MistralConfig", {"sliding_window": SLIDING_WINDOW, "head_dim": 16}),
    "gemma2": _Recipe(
        "Gemma2Config",
        {
            "sliding_window": SLIDING_WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "num_hidden_layers": 4,
        },
    ),
    "phi3": _Recipe("Phi3Config", {"sliding_window": SLIDING_WINDOW}),
    "olmo2": _Recipe("Olmo2Config", {}),
    "gpt_neox": _Recipe("GPTNeoXConfig", {}, without=("num_key_value_heads",)),
    "gpt_oss": _Recipe(
        "GptOssConfig",
        {
            "sliding_window": SLIDING_WINDOW,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": _Recipe(
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    # What follows cannot be served; the loader has to say so.
    "falcon": _Recipe("FalconConfig", {}),
    "bloom": _Recipe("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mamba": _Recipe("MambaConfig", {}),
    "lfm2": _Recipe("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "qwen3_next": _Recipe(
        "Qwen3NextConfig",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            **_EXPERTS,
        },
    ),
}

ARCHITECTURES: tuple[str, ...] = tuple(_RECIPES)


def make_tiny_model(
    architecture: str,
    directory: Path,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Saves a random model of `architecture`, one of ARCHITECTURES or another type, in `directory`.

    The same arguments give the same weights. `overrides` are options of its configuration. Returns
    `directory`. There is no tokenizer.
    """
    config = make_tiny_config(architecture, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model_class(config)(config)
        _spread(model)
    untyped: Any = model
    untyped.to(dtype).save_pretrained(directory)
    return directory


def load_tiny_model(
    architecture: str,
    directory: Path,
    dtype: str = "auto",
    max_model_len: int | None = None,
    seed: int = 0,
    **overrides: object,
) -> LoadedModel:
    """Saves such a model in `directory`, and loads it on the CPU as an executor does."""
    from executor_service.checkpoint import ModelConfig, load_model

    make_tiny_model(architecture, directory, seed=seed, overrides=overrides)
    return load_model(ModelConfig(str(directory), dtype=dtype, max_model_len=max_model_len))


def edit_json(path: Path, **changes: object) -> None:
    """Changes fields of a JSON file, which need not be there yet."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def load_engine_of(*flags: str) -> LoadedEngine:
    """An engine as an executor that is started with `flags` loads it."""
    from executor_service.config import ExecutorConfig
    from executor_service.engine_loader import load_engine
    from splitserve_options import options

    values = options.parse("executor", list(flags), {})
    return load_engine(ExecutorConfig.from_options(values), executor_epoch=1)


def make_tiny_config(
    architecture: str, overrides: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The configuration of such a model."""
    import transformers

    if architecture not in _RECIPES:
        shrunk: PreTrainedConfig = shrunk_config(architecture, overrides)
        return shrunk
    recipe = _RECIPES[architecture]
    options = {**_COMMON, **recipe.options, **(overrides or {})}
    for option in recipe.without:
        options.pop(option, None)
    config_class = getattr(transformers, recipe.config_class)
    config: PreTrainedConfig = config_class(**options)
    return config


def auto_class(config: PreTrainedConfig) -> Any:  # noqa: ANN401
    """The class of `transformers` that loads a model of `config`, with a head for tokens."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto

    causal: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    multimodal: Any = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if type(config) in multimodal and type(config) not in causal:
        return AutoModelForMultimodalLM
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _model_class(config: PreTrainedConfig) -> Callable[[PreTrainedConfig], PreTrainedModel]:
    auto = auto_class(config)
    from_config: Callable[[PreTrainedConfig], PreTrainedModel] = auto.from_config
    return from_config


def _spread(model: nn.Module) -> None:
    """Makes what is initialised to a constant (norms, biases, sinks) matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
