"""The float32 cut of a model that a trial compares, and what is said of trials that fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ModelUnsupported
from executor_service.model import LoadedModel
from executor_service.trials import CUT_VOCAB_SIZE, cut_to_float32, far_tokens, model_trial
from executor_service.trials import layer_trial as model_cut
from tests.support.models.tiny_models import load_tiny_model, make_tiny_model

TYPES = ["full_attention", "full_attention", "sliding_attention", "full_attention"]


def _cut(loaded: LoadedModel) -> Any:  # noqa: ANN401
    return cut_to_float32(loaded.model, loaded.attention_modules)


@pytest.mark.parametrize(
    ("architecture", "overrides", "num_layers"),
    [
        ("llama", {"num_hidden_layers": 4}, 1),
        ("cwm", {"num_hidden_layers": 4, "layer_types": TYPES}, 3),
        ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 3}, 3),
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 2}, 3),
    ],
)
def test_cut_has_the_first_layers_of_every_kind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    overrides: Mapping[str, Any],
    num_layers: int,
) -> None:
    loaded = load_tiny_model(architecture, tmp_path, "bfloat16", **overrides)
    monkeypatch.setattr(model_cut, "_SMALL_BYTES", 0)
    model: Any = loaded.model
    # Some parameters of some models are float32 in any type.
    before = [parameter.dtype for parameter in model.parameters()]
    assert torch.bfloat16 in before
    cut = _cut(loaded)
    assert len(cut.model.layers) == num_layers
    assert {parameter.dtype for parameter in cut.parameters()} == {torch.float32}
    assert len(model.model.layers) == 4
    assert [parameter.dtype for parameter in model.parameters()] == before


def test_cut_computes_the_same_when_no_layer_is_left_out(tmp_path: Path) -> None:
    loaded = load_tiny_model("gemma2", tmp_path)
    model: Any = loaded.model
    model.set_attn_implementation("eager")
    cut = _cut(loaded)
    tokens = torch.arange(20)[None]
    assert torch.equal(cut(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_cut_knows_the_first_tokens_only_when_there_are_many(
    tmp_path: Path, dtype: str, is_tied: bool
) -> None:
    # The padding token is among those that are left out.
    options: dict[str, Any] = {
        "vocab_size": 3000,
        "pad_token_id": 2999,
        "tie_word_embeddings": is_tied,
    }
    loaded = load_tiny_model("llama", tmp_path, dtype, **options)
    cut, model = _cut(loaded), loaded.model
    expected: Any = model.get_parameter("lm_head.weight")
    assert torch.equal(cut.lm_head.weight, expected[:CUT_VOCAB_SIZE].float())
    assert cut.model.embed_tokens.weight.shape == (CUT_VOCAB_SIZE, 64)
    # Who takes the cut apart leaves the model whole.
    cut.lm_head.weight.data = torch.empty(0)
    assert expected.shape == (3000, 64)


def test_load_model_compares_with_noise_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_cut, "available_host_bytes", lambda: 1000)
    loaded = load_tiny_model("llama", tmp_path, "bfloat16")
    assert loaded.dtype_name == "bfloat16"
    assert "not_tried_in_float32 model=LlamaForCausalLM" in caplog.text
    assert _cut(loaded) is None


def test_far_tokens_are_around_every_number_when_positions_reach_it(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 4000,
    }
    loaded = load_tiny_model("llama", tmp_path, max_position_embeddings=9000, rope_parameters=rope)
    model: Any = loaded.model
    model.config.of_tomorrow = {"deep": {"limit": 7000.0}, "beyond": 12_000}
    starts = far_tokens(model, model.config, 8500).starts.tolist()
    assert {4000 - 2, 7000 - 2, 8500 - 8} <= set(starts)
    assert all(0 <= start <= 8500 - 8 for start in starts)


def test_configuration_is_named_when_the_models_own_code_fails(tmp_path: Path) -> None:
    # Rotary embeddings of 64 numbers, for heads of 16.
    make_tiny_model("codegen", tmp_path)

    with pytest.raises(ModelUnsupported, match="CodeGenForCausalLM") as refusal:
        load_model(ModelConfig(str(tmp_path)))

    assert "its code in transformers cannot run with this config.json" in str(refusal.value)


def test_paged_attention_is_named_when_a_model_fails_with_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:  # noqa: ANN401
        raise RuntimeError("sizes do not match")

    make_tiny_model("llama", tmp_path)
    monkeypatch.setattr(model_trial, "probe_attention", fail)

    with pytest.raises(ModelUnsupported) as refusal:
        load_model(ModelConfig(str(tmp_path)))

    assert "only with paged attention (sizes do not match)" in str(refusal.value)
