from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from executor_service.decoders.llama_config import unknown_fields, why_not_llama_config
from tests.support.models.tiny_models import make_tiny_config

LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _model(architecture: str, overrides: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(make_tiny_config(architecture, overrides))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
        (
            "llama",
            {"some_field_of_tomorrow": None, "tokenizer_class": "X", "torch_dtype": "float16"},
        ),
        ("llama", {"is_llama_config": True, "rope_interleaved": False, "use_mrope": False}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("ministral", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("cwm", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("seed_oss", {}),
    ],
)
def test_why_not_llama_config_says_nothing_when_every_field_is_understood(
    architecture: str, overrides: Mapping[str, Any]
) -> None:
    model = _model(architecture, overrides)
    assert why_not_llama_config(model) is None
    assert unknown_fields(vars(model.config)) == {}


@pytest.mark.parametrize(
    "overrides",
    [
        {"base_model_tp_plan": {"layers.*.self_attn.q_proj": "colwise"}},
        {"base_model_some_plan": {"layers.*": "x"}},
        {"unk_token_id": 3, "image_token_id": 7, "bos_token": "<s>", "add_bos_token": True},
        {"max_sequence_length": 2048, "model_max_length": 99, "padding_side": "left"},
        {"gradient_checkpointing": False, "use_bfloat16": True, "torchscript": False},
        {"task_specific_params": {"summary": {"num_beams": 4}}, "finetuning_task": "x"},
        {"pruned_heads": {}, "tie_encoder_decoder": False, "pretraining_tp": 2, "is_decoder": True},
        {"temperature": 0.5, "top_k": 20, "num_beams": 4, "watermarking_config": {"bias": 2}},
        {"chunk_size_feed_forward": 4, "problem_type": "regression", "return_dict": False},
        {"tokenizer_class": "X", "chat_template": "{{ messages }}", "some_field_of_tomorrow": None},
    ],
)
def test_unknown_fields_are_none_when_the_fields_belong_to_others(
    overrides: Mapping[str, Any],
) -> None:
    model = _model("llama")
    for name, setting in overrides.items():
        setattr(model.config, name, setting)
    assert unknown_fields(vars(model.config)) == {}


def test_unknown_fields_names_what_may_matter_when_a_checkpoint_has_it() -> None:
    model, unknown = (
        _model("llama"),
        {
            "some_field_of_tomorrow": 0.95,
            "some_switch_of_tomorrow": False,
            "residual_multiplier": 0.95,
            "no_rope_layers": [1, 0],
            "attn_logit_softcapping": 30.0,
            "num_global_tokens": 4,
            "_hidden_setting": 2,
        },
    )
    for name, setting in unknown.items():
        setattr(model.config, name, setting)
    model.config.rope_parameters = {**LLAMA3, "llama_4_scaling_beta": 0.1}
    assert unknown_fields(vars(model.config)) == {
        **unknown,
        "rope_parameters.llama_4_scaling_beta": 0.1,
    }
    # The trial of the decoder judges them.
    assert why_not_llama_config(model) is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"is_causal": False}, "is_causal is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
    ],
)
def test_why_not_llama_config_names_a_field_when_its_setting_is_not_computed(
    overrides: Mapping[str, Any], named: str
) -> None:
    model = _model("llama")
    for name, setting in overrides.items():
        setattr(model.config, name, setting)
    assert why_not_llama_config(model) == f"{named}, which is not understood"


@pytest.mark.parametrize("nested", [{"full_attention": LLAMA3}, {"main": {"rope_theta": 1e4}}])
def test_why_not_llama_config_names_rotary_parameters_when_layers_have_their_own(
    nested: Mapping[str, Any],
) -> None:
    model = _model("llama")
    model.config.rope_parameters = nested
    (name,) = nested
    assert f"rope_parameters.{name} is" in str(why_not_llama_config(model))


def test_why_not_llama_config_names_the_type_of_a_layer_when_it_is_unknown() -> None:
    model = _model("cwm")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert str(why_not_llama_config(model)).startswith("layer_types is ['full_attention', 'chunked")


@pytest.mark.parametrize("architecture", ["ministral3", "smollm3", "granite", "ernie4_5", "helium"])
def test_why_not_llama_config_names_the_class_when_only_its_parts_are_a_llamas(
    architecture: str,
) -> None:
    reason = str(why_not_llama_config(_model(architecture)))
    assert reason.endswith("is no class that is known to compute a Llama")


def test_why_not_llama_config_names_the_class_when_it_is_derived_from_a_llama() -> None:
    from transformers import LlamaForCausalLM

    base: Any = LlamaForCausalLM
    scaled = type("Scaled", (base,), {})  # it computes who knows what
    with torch.device("meta"):
        model = scaled(make_tiny_config("llama"))
    assert str(why_not_llama_config(model)).startswith("Scaled is no class")
