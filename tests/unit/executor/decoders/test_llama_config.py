from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from executor_service.decoders.llama_config import why_not_llama_config
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
        ("llama", {"is_llama_config": True, "rope_interleaved": False}),
        ("mistral", {}),
        ("ministral", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen2", {"use_mrope": False}),
        ("qwen3", {}),
        ("cwm", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("seed_oss", {}),
    ],
)
def test_why_not_llama_config_says_nothing_when_every_field_is_understood(
    architecture: str, overrides: Mapping[str, Any]
) -> None:
    assert why_not_llama_config(_model(architecture, overrides)) is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"some_field_of_tomorrow": 0.95}, "some_field_of_tomorrow is 0.95"),
        ({"some_switch_of_tomorrow": False}, "some_switch_of_tomorrow is False"),
        ({"residual_multiplier": 0.95}, "residual_multiplier is 0.95"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"is_causal": False}, "is_causal is False"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"_hidden_setting": 2}, "_hidden_setting is 2"),
        (
            {"rope_parameters": {**LLAMA3, "llama_4_scaling_beta": 0.1}},
            "rope_parameters.llama_4_scaling_beta is 0.1",
        ),
    ],
)
def test_why_not_llama_config_names_a_field_when_it_is_not_understood(
    overrides: Mapping[str, Any], named: str
) -> None:
    model = _model("llama")
    # As it comes from a checkpoint: what the class does not know is kept.
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
