"""Which configurations are those of a Llama, and how the layers of one are taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.decoders import take_layers, unknown_fields, why_not_llama_config
from tests.support.models.tiny_models import load_tiny_model, make_tiny_config

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


def _with_fields(architecture: str, fields: Mapping[str, Any]) -> Any:  # noqa: ANN401
    model = _model(architecture)
    for name, setting in fields.items():
        setattr(model.config, name, setting)
    return model


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
    assert unknown_fields(vars(_with_fields("llama", overrides).config)) == {}


def test_unknown_fields_names_what_may_matter_when_a_checkpoint_has_it() -> None:
    unknown = {
        "some_field_of_tomorrow": 0.95,
        "some_switch_of_tomorrow": False,
        "residual_multiplier": 0.95,
        "no_rope_layers": [1, 0],
        "attn_logit_softcapping": 30.0,
        "num_global_tokens": 4,
        "_hidden_setting": 2,
    }
    rope = {**LLAMA3, "llama_4_scaling_beta": 0.1}
    model = _with_fields("llama", {**unknown, "rope_parameters": rope})
    expected = {**unknown, "rope_parameters.llama_4_scaling_beta": 0.1}
    assert unknown_fields(vars(model.config)) == expected
    # The trial of the decoder judges them.
    assert why_not_llama_config(model) is None


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("llama", {"is_causal": False}, "is_causal is False, which is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported"),
        (
            "llama",
            {"add_cross_attention": True},
            "add_cross_attention is True, which is not supported",
        ),
        # Layers have rotary parameters of their own.
        (
            "llama",
            {"rope_parameters": {"full_attention": LLAMA3}},
            "rope_parameters.full_attention is",
        ),
        ("llama", {"rope_parameters": {"main": {"rope_theta": 1e4}}}, "rope_parameters.main is"),
        (
            "cwm",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types is ['full_attention', 'chunked",
        ),
    ],
)
def test_why_not_llama_config_names_an_unsupported_field(
    architecture: str, fields: Mapping[str, Any], reason: str
) -> None:
    assert str(why_not_llama_config(_with_fields(architecture, fields))).startswith(reason)


@pytest.mark.parametrize("architecture", ["ministral3", "smollm3", "granite", "ernie4_5", "helium"])
def test_why_not_llama_config_names_the_class_of_lookalikes(
    architecture: str,
) -> None:
    reason = str(why_not_llama_config(_model(architecture)))
    assert reason.endswith("is not a supported Llama class")


def test_why_not_llama_config_names_a_subclass_of_llama() -> None:
    from transformers import LlamaForCausalLM

    base: Any = LlamaForCausalLM
    scaled = type("Scaled", (base,), {})  # it computes who knows what
    with torch.device("meta"):
        model = scaled(make_tiny_config("llama"))
    assert str(why_not_llama_config(model)).startswith("Scaled is not a supported Llama class")


def test_take_layers_frees_each_layer_before_the_next(tmp_path: Path) -> None:
    loaded = load_tiny_model("qwen3", tmp_path, num_hidden_layers=3)
    model: Any = loaded.model
    queries = [layer.self_attn.q_proj.weight.detach().clone() for layer in model.model.layers]
    for index, weights in enumerate(take_layers(loaded)):
        assert torch.equal(weights.query.weight, queries[index])
        kept = [any(p.numel() for p in layer.parameters()) for layer in model.model.layers]
        assert kept == [layer >= index for layer in range(3)]
    assert model.model.embed_tokens.weight.numel()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="there is no /proc")
def test_take_layers_keeps_no_pages_of_layers_that_were_copied(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    loaded = load_tiny_model("llama", tmp_path, **sizes, initializer_range=0.02)
    file_kib = (tmp_path / "model.safetensors").stat().st_size // 1024
    resident = []
    for layer in take_layers(loaded):
        layer.down.weight.detach().sum()
        layer.query.weight.detach().sum()
        resident.append(_resident_kib(tmp_path))
    # Each alone: its own pages and some around them.
    assert 0 < max(resident) < file_kib // 3


def _resident_kib(directory: Path) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(directory / "model.safetensors")):
            return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    return 0
