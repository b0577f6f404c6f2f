"""Which configurations the decoders of our own compute: every field of theirs is accounted for.

Nothing is taken on trust. A class of models is on the list because its code was read; a field is
here because it was decided what it does to the decoders. What is set and not here, because it came
with a later `transformers` or stands in a checkpoint only, refuses the decoder by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

# Names, tokens, training, and how `transformers` is to run: they change no logits.
_WITHOUT_INFLUENCE = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        # Dropout is for training.
        "attention_dropout",
        "hidden_dropout",
        "residual_dropout",
        # The books of `transformers`.
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation_internal",
        "_name_or_path",
        "_output_attentions",
        "_post_init_done",
    }
)
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
        "chunk_size_feed_forward": (0,),
        "hidden_act": ("silu",),
        "is_causal": (True,),
        "is_decoder": (True, False),
        "is_encoder_decoder": (False,),
        "pretraining_tp": (1,),
        # Of converters: well-known checkpoints have them.
        "is_llama_config": (True,),
        "rope_interleaved": (False,),
        "use_mrope": (False,),
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
    """What of its class or configuration the decoders do not compute, by name; None if nothing."""
    model_class = type(model)
    if f"{model_class.__module__}.{model_class.__qualname__}" not in _CLASSES:
        return f"{model_class.__name__} is no class that is known to compute a Llama"
    return why_not_llama_settings(vars(model.config))


def why_not_llama_settings(settings: Mapping[str, object]) -> str | None:
    """What of a configuration's `settings` is not that of a Llama, by name; None if nothing."""
    for name, setting in _fields(settings):
        if not _is_understood(name, setting):
            return f"{name} is {setting!r}, which is not understood"
    return None


def _fields(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """All that is set, the rotary parameters one by one: "rope_parameters.factor"."""
    for name, setting in settings.items():
        if name in _ROPE_FIELDS and isinstance(setting, dict):
            yield from ((f"{name}.{key}", each) for key, each in setting.items())
        else:
            yield name, setting


def _is_understood(name: str, setting: object) -> bool:
    if setting is None or name in _WITHOUT_INFLUENCE or name in _TAKEN_FROM_THE_MODEL:
        return True
    if name == "layer_types":
        return isinstance(setting, (list, tuple)) and _LAYER_TYPES.issuperset(setting)
    field, _, key = name.partition(".")
    if field in _ROPE_FIELDS:
        return key in _ROPE_PARAMETERS and not isinstance(setting, dict)
    return any(setting == each and type(setting) is type(each) for each in _ONLY.get(name, ()))
