"""Which configurations the decoders of our own may compute.

A class of models is on the list because its code was read. Fields of its configuration that are
known are accounted for here, and fields that belong to others (the base class of `transformers`,
generation, tokenizers, plans for cutting a model) have no influence by rule: their names are taken
from the `transformers` that is installed. Fields that are left are unknown. They refuse no decoder;
its trial against `transformers`' own forward pass decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

# What computes a Llama and nothing else, as the fields below describe it.
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

# Names, training, and how `transformers` is to run: no logits change. Most of these fields were
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
# Switches that are off, in checkpoints of converters.
_OFF = frozenset({"rope_interleaved", "use_mrope"})
# Tokens by their names or ids, whether a tokenizer adds them, and plans for cutting a model.
_NAMES_WITHOUT_INFLUENCE = re.compile(r"_(token|token_ids?|plan)$")
# What the decoders take from the weights, from what modules pass to the attention, or from the
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
# What the decoders compute with these values, and with no others.
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
# All that enters the cosines and sines, which are tabulated.
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
        return f"{model_class.__name__} is no class that is known to compute a Llama"
    return next(_wrong_settings(vars(model.config)), None)


def why_not_llama_settings(settings: Mapping[str, object]) -> str | None:
    """Returns what of `settings` is not known to be that of a Llama, by name; None if nothing.

    For configurations that no class of `transformers` computes, so that no trial can decide.
    """
    unknown = unknown_fields(settings).items()
    reasons = (f"{name} is {setting!r}, which is not understood" for name, setting in unknown)
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
    """Says what is known and is not computed: one rotary embedding serves all layers, for one."""
    for name, setting in _fields(settings):
        is_wrong = name in _ONLY and setting is not None and setting not in _ONLY[name]
        is_nested = "." in name and isinstance(setting, dict)
        if is_wrong or is_nested or (name == "layer_types" and not _are_layer_types(setting)):
            yield f"{name} is {setting!r}, which is not understood"


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
    """Returns the names of the base class, of generation and of tokenizers.

    They are those of the installed `transformers`, whatever its version.
    """
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

    untyped: tuple[Any, ...] = (PreTrainedConfig, GenerationConfig, PreTrainedTokenizerBase)
    of_class = PreTrainedConfig.__annotations__
    of_instances = (vars(each()) for each in untyped)
    return frozenset(of_class).union(*of_instances)
