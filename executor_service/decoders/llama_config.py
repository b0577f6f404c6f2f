"""Recognition of models that our decoders can run, by configuration and parts; their weights.

A class of models is on the list because its code was read. Known configuration fields are accounted
for here. Fields that belong to others (the base class of `transformers`, generation, tokenizers,
plans for splitting a model) have no influence by rule: their names are taken from the installed
`transformers`. All other fields are unknown. They do not refuse a decoder; its trial against
`transformers`' own forward pass decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.device import release_file_pages, release_freed_memory
from executor_service.model import (
    LoadedModel,
    QuantizedEmbedding,
    QuantizedLinear,
    quantized_layers,
    show_progress,
    weights_bytes,
)
from splitserve_kernels.decoder_inputs import DecoderShape, LayerWeights, LinearWeights

# Classes that compute a Llama, as the fields below describe it, and nothing else.
_CLASSES = frozenset(
    {
        "transformers.models.cwm.modeling_cwm.CwmForCausalLM",
        "transformers.models.llama.modeling_llama.LlamaForCausalLM",
        "transformers.models.ministral.modeling_ministral.MinistralForCausalLM",
        "transformers.models.mistral.modeling_mistral.MistralForCausalLM",
        "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM",
        "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM",
        "transformers.models.seed_oss.modeling_seed_oss.SeedOssForCausalLM",
    }
)

# Names, training, and options of `transformers` that change no logits. Most of these fields were
# set by earlier versions of its base class and are still in checkpoints.
_WITHOUT_INFLUENCE = frozenset(
    {
        "_attn_implementation_autoset",
        "_commit_hash",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "embd_pdrop",
        "finetuning_task",
        "gradient_checkpointing",
        "hidden_dropout",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "prefix",
        "pretraining_tp",
        "pruned_heads",
        "residual_dropout",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
    }
)
# Switches that must be off; some converters write them into checkpoints.
_OFF = frozenset({"rope_interleaved", "use_mrope"})
# Tokens by their names or ids, tokenizer switches, and plans for splitting a model.
_NAMES_WITHOUT_INFLUENCE = re.compile(r"_(token|token_ids?|plan)$")
# Fields whose effect the decoders take from the weights, from attention arguments, or from the
# tables of the model's own rotary embedding, whatever the value.
_TAKEN_FROM_THE_MODEL = frozenset(
    {
        "attention_bias",
        "attention_out_bias",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "max_seq_len",
        "max_seq_length",
        "max_sequence_length",
        "max_window_layers",
        "mlp_bias",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)
# Fields with the only values that the decoders compute.
_ONLY: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False,),
        "hidden_act": ("silu",),
        "is_causal": (True,),
        "is_encoder_decoder": (False,),
    }
)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ROPE_FIELDS = frozenset({"rope_parameters", "rope_scaling"})
# Parameters of the cosines and sines, which are tabulated.
_ROPE_PARAMETERS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "long_factor",
        "low_freq_factor",
        "max_position_embeddings",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "short_factor",
        "truncate",
        "type",
    }
)


def why_not_llama_config(model: Any) -> str | None:  # noqa: ANN401
    """Returns what of its class or configuration the decoders do not compute; None if nothing.

    Unknown fields are no reason: see `unknown_fields`.
    """
    model_class = type(model)
    if f"{model_class.__module__}.{model_class.__qualname__}" not in _CLASSES:
        return f"{model_class.__name__} is not a supported Llama class"
    return next(_wrong_settings(vars(model.config)), None)


def why_not_llama_settings(settings: Mapping[str, object]) -> str | None:
    """Returns an explanation of the first setting that Llama decoders do not support, else None.

    It is for configurations that no class of `transformers` computes, so that no trial can decide.
    """
    unknown = unknown_fields(settings).items()
    reasons = (f"{name} is {setting!r}, which is not supported" for name, setting in unknown)
    return next(_wrong_settings(settings), next(reasons, None))


def unknown_fields(settings: Mapping[str, object]) -> dict[str, object]:
    """Returns the fields that may change what a model computes, for all that is known here.

    Rotary parameters are named one by one: "rope_parameters.factor". A field that is None counts as
    not set.
    """
    return {
        name: setting
        for name, setting in _fields(settings)
        if setting is not None and not _is_known(name, setting)
    }


def _wrong_settings(settings: Mapping[str, object]) -> Iterator[str]:
    """Yields a reason for each known field whose value the decoders do not compute.

    One rotary embedding must serve all layers, for example.
    """
    for name, setting in _fields(settings):
        is_wrong = name in _ONLY and setting is not None and setting not in _ONLY[name]
        is_nested = "." in name and isinstance(setting, dict)
        if is_wrong or is_nested or (name == "layer_types" and not _are_layer_types(setting)):
            yield f"{name} is {setting!r}, which is not supported"


def _fields(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, setting in settings.items():
        if name in _ROPE_FIELDS and isinstance(setting, dict):
            yield from ((f"{name}.{key}", each) for key, each in setting.items())
        else:
            yield name, setting


def _is_known(name: str, setting: object) -> bool:
    if name in _ONLY or name in _TAKEN_FROM_THE_MODEL or name in _WITHOUT_INFLUENCE:
        return True
    if name == "layer_types":
        return _are_layer_types(setting)
    if name in _OFF:
        return setting is False
    field, _, key = name.partition(".")
    if field in _ROPE_FIELDS:
        return key in _ROPE_PARAMETERS and not isinstance(setting, dict)
    return bool(_NAMES_WITHOUT_INFLUENCE.search(name)) or name in _fields_of_others()


def _are_layer_types(setting: object) -> bool:
    if setting is None:
        return True
    return isinstance(setting, (list, tuple)) and _LAYER_TYPES.issuperset(setting)


@cache
def _fields_of_others() -> frozenset[str]:
    """Returns the field names of the base class, of generation and of tokenizers.

    They are those of the installed `transformers`, whatever its version.
    """
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

    untyped: tuple[Any, ...] = (PreTrainedConfig, GenerationConfig, PreTrainedTokenizerBase)
    of_class = PreTrainedConfig.__annotations__
    of_instances = (vars(each()) for each in untyped)
    return frozenset(of_class).union(*of_instances)


# -- Parts of models of the Llama kind, taken out for a decoder ------------------------------------
#
# A model is recognised by its class and every field of its configuration (above), then by its
# parts; a trial of the decoder comes after that. The reasons are in
# docs/adr/0009-decoder-eligibility.md.

HEAD = "lm_head"
# Pages of packed weights are released when there are so many, or this part of all.
_RELEASED_BYTES = 64 * 2**20
_NUM_RELEASES = 8
# Names of the matrices of a layer, in the order of the fields of LayerUpdates.
LAYER_MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_MODEL_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_ACTIVATIONS = {"SiLU", "SiLUActivation"}


def why_not_llama(loaded: LoadedModel) -> str | None:
    """Returns what distinguishes a model from the Llama kind; None if it may be one."""
    model: Any = loaded.model
    return why_not_llama_config(model) or _why_not_parts(model) or _why_not_layers(loaded)


def _why_not_parts(model: Any) -> str | None:  # noqa: ANN401
    base = getattr(model, "model", None)
    if _parts(model) != {"model", "lm_head"} or base is None or _parts(base) != _MODEL_PARTS:
        return "the model has other submodules"
    for layer in base.layers:
        attention_parts = _parts(getattr(layer, "self_attn", None))
        if (
            _parts(layer) != _LAYER_PARTS
            or attention_parts not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS)
            or _parts(layer.mlp) != _MLP_PARTS
        ):
            return "its layers have other submodules"
        activation = type(layer.mlp.act_fn).__name__
        if activation not in _ACTIVATIONS:
            return f"its activation is {activation}"
    norms = [module for name, module in base.named_modules() if name.endswith("norm")]
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
    if len(epsilons) > 1 or None in epsilons:
        return "its norms do not share one epsilon"
    return None


def _why_not_layers(loaded: LoadedModel) -> str | None:
    shapes = {(shape.key_dim, shape.value_dim, shape.num_kv_heads) for shape in loaded.layers}
    key_dim, value_dim, _ = next(iter(shapes))
    if len(shapes) > 1 or key_dim != value_dim or key_dim % 2:
        return "its heads have different or odd sizes"
    options = loaded.layer_options
    if len({each.scale for each in options}) > 1:
        return "its layers use different attention scales"
    if any(each.softcap is not None or each.sinks is not None for each in options):
        return "its attention has a soft cap or sinks"
    return None


def decoder_shape(loaded: LoadedModel, rotary_dim: int) -> DecoderShape:
    """Returns the sizes of a model for which `why_not_llama` returns None."""
    model: Any = loaded.model
    layer, key = model.model.layers[0], loaded.layers[0]
    return DecoderShape(
        width=model.model.embed_tokens.embedding_dim,
        mlp_width=layer.mlp.gate_proj.out_features,
        num_heads=layer.self_attn.q_proj.out_features // key.key_dim,
        num_kv_heads=key.num_kv_heads,
        head_dim=key.key_dim,
        rotary_dim=rotary_dim,
        epsilon=float(layer.input_layernorm.variance_epsilon),
        scale=loaded.layer_options[0].scale,
    )


def take_layers(loaded: LoadedModel) -> Iterator[LayerWeights]:
    """Yields the weights of each layer. The model loses a layer when the next one is asked for.

    Mapped pages of the lost weights are released, too, so memory holds copied weights once.
    """
    model: Any = loaded.model
    layers = list(zip(model.model.layers, loaded.layer_windows, strict=True))
    num_bytes, enough = 0, min(_RELEASED_BYTES, weights_bytes(model) // _NUM_RELEASES)
    for layer, window in show_progress(layers, "layers packed"):
        attention, mlp = layer.self_attn, layer.mlp
        yield LayerWeights(
            query=linear_weights(attention.q_proj),
            key=linear_weights(attention.k_proj),
            value=linear_weights(attention.v_proj),
            attention_output=linear_weights(attention.o_proj),
            gate=linear_weights(mlp.gate_proj),
            up=linear_weights(mlp.up_proj),
            down=linear_weights(mlp.down_proj),
            input_norm=layer.input_layernorm.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            sliding_window=window,
        )
        num_bytes += weights_bytes(layer)
        is_quantised = bool(quantized_layers(layer))
        release_weights(layer)
        # Finding the pages takes as long as packing a small layer.
        if is_quantised or num_bytes >= enough:
            num_bytes = 0
            release_file_pages()
            release_freed_memory()


def linear_weights(
    module: nn.Linear | nn.Embedding | QuantizedLinear | QuantizedEmbedding,
) -> LinearWeights:
    """Returns the weights of the module, not copied; an embedding has an output for each token."""
    bias: nn.Parameter | None = getattr(module, "bias", None)
    if isinstance(module, QuantizedLinear | QuantizedEmbedding):
        return LinearWeights(torch.empty(0), bias, module.stored)
    return LinearWeights(module.weight, bias)


def release_weights(module: nn.Module) -> None:
    """Empties all parameters of `module`, which cannot run any more."""
    for quantised in quantized_layers(module):
        quantised.release()
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def rotation(loaded: LoadedModel, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of positions `start` .. `end` - 1, see `rotation_at`.

    Positions beyond the longest sequence are left out: with these the angles of some models would
    change for all positions.
    """
    end = min(end, loaded.max_model_len)
    return rotation_at(loaded, torch.arange(start, end, device=loaded.device))


def rotation_at(loaded: LoadedModel, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of `positions` [P], [P, rotary_dim / 2] float32 each."""
    model: Any = loaded.model
    anything = torch.zeros(1, dtype=torch.float32, device=loaded.device)
    cosines, sines = model.model.rotary_emb(anything, positions[None])
    # Both halves of a head are rotated by the same angles.
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()


def _parts(module: Any) -> set[str]:  # noqa: ANN401
    return set() if module is None else {name for name, _ in module.named_children()}
