from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ModelUnreadable, ModelUnsupported
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch
from tests.support.models.tiny_models import (
    EOS_TOKEN_ID,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    edit_json,
    load_tiny_model,
    make_tiny_model,
)

pytestmark = pytest.mark.cases(12)


def test_load_model_describes_the_model_when_it_can_be_served(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    loaded = load_model(ModelConfig(str(llama)))
    assert loaded.name == "tiny-llama"
    assert loaded.architecture == "LlamaForCausalLM"
    assert loaded.dtype_name == "float32"
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.max_model_len == 512
    assert loaded.eos_token_ids == (EOS_TOKEN_ID,)
    assert loaded.tokenizer_files == {"tokenizer.json": llama / "tokenizer.json"}
    assert loaded.keeps_logits
    assert [(s.num_kv_heads, s.key_dim, s.value_dim) for s in loaded.layers] == [(2, 16, 16)] * 2
    assert len(loaded.attention_modules) == 2


@pytest.mark.parametrize(
    ("architecture", "overrides", "window"),
    [
        ("mistral", {}, SLIDING_WINDOW),
        ("mistral", {"sliding_window": None}, None),
        ("llama", {}, None),
        ("phi3", {}, SLIDING_WINDOW),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 5}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, 5),
        ("gemma2", {}, None),
        ("gpt_oss", {}, None),
    ],
)
def test_load_model_finds_a_sliding_window_when_every_layer_has_it(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], window: int | None
) -> None:
    assert load_tiny_model(architecture, tmp_path, **overrides).sliding_window == window


def test_load_model_takes_the_options_when_they_are_given(llama: Path) -> None:
    options = ModelConfig(str(llama), dtype="bfloat16", max_model_len=100, name="mine")
    loaded = load_model(options)
    assert (loaded.name, loaded.dtype, loaded.max_model_len) == ("mine", torch.bfloat16, 100)


def test_load_model_prefers_eos_of_the_generation_config(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[7, 9])
    assert load_model(ModelConfig(str(llama))).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [
        ("falcon", {}, "FalconForCausalLM: bypasses transformers' attention interface"),
        ("bloom", {}, "BloomForCausalLM: bypasses transformers' attention interface"),
        ("mamba", {}, "mamba: .* recurrent state"),
        ("qwen3_next", {}, "qwen3_next: linear attention keeps a recurrent state"),
        ("lfm2", {}, "lfm2: convolution layers keep a state"),
        ("fsmt", {}, "FSMTForConditionalGeneration: bypasses transformers' attention interface"),
        ("t5gemma", {}, "T5GemmaDecoderLayer has no encoder_attn or EncDecAttention"),
    ],
)
def test_load_model_refuses_by_name_when_it_cannot_serve(
    tmp_path: Path, architecture: str, overrides: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        load_tiny_model(architecture, tmp_path, **overrides)


def test_load_model_refuses_when_more_positions_are_asked_than_there_are(llama: Path) -> None:
    with pytest.raises(ModelUnsupported, match="--max-model-len is 513; allowed: at most 512"):
        load_model(ModelConfig(str(llama), max_model_len=513))


def test_load_model_refuses_when_weights_have_another_shape(llama: Path) -> None:
    edit_json(llama / "config.json", intermediate_size=100)
    with pytest.raises(
        ModelUnreadable, match=r"shape \[.*96.*\] where the configuration implies \[.*100.*\]"
    ) as caught:
        load_model(ModelConfig(str(llama)))
    assert "\n" not in str(caught.value)


def test_load_model_refuses_when_logits_are_not_finite(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["lm_head.weight"][5] = torch.nan
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match="logits are not finite"):
        load_model(ModelConfig(str(llama)))


@pytest.mark.parametrize("wrong", ["scale", "window", "chunks"])
def test_load_model_refuses_when_the_trial_disagrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    right = reference.paged_attention

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, options: AttentionOptions
    ) -> Tensor:
        if wrong == "scale":
            options = replace(options, scale=options.scale * 1.1)
        elif wrong == "window":
            options = replace(options, sliding_window=SLIDING_WINDOW + 1)
        else:
            batch = replace(batch, num_computed_tokens=batch.num_computed_tokens * 0)
        return right(query, keys, values, batch, options)

    make_tiny_model("mistral", tmp_path)
    monkeypatch.setattr(reference, "paged_attention", attend)
    with pytest.raises(ModelUnsupported, match="differ from those of transformers"):
        load_model(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_next", "bloom"])
def test_load_model_refuses_by_its_trial_when_nothing_told_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    for check in ("check_config", "check_model_class"):
        monkeypatch.setattr(f"executor_service.checkpoint.model_loader.{check}", lambda *_: None)
    make_tiny_model(architecture, tmp_path)
    with pytest.raises(ModelUnsupported, match=r"differ from those of transformers|bypasses"):
        load_model(ModelConfig(str(tmp_path)))


def test_load_model_refuses_a_window_applied_by_mask_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model("mistral", tmp_path, overrides={"sliding_window": 300})
    monkeypatch.setattr(
        "executor_service.trials.model_trial.expected_windows",
        lambda _, num_layers: [299] * num_layers,
    )
    with pytest.raises(ModelUnsupported, match="window of 299 tokens is applied by mask only"):
        load_model(ModelConfig(str(tmp_path)))
    assert load_model(ModelConfig(str(tmp_path), max_model_len=299)).max_model_len == 299


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_load_model_accepts_when_precision_is_half(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    assert load_tiny_model(architecture, tmp_path, dtype).dtype_name == dtype


def _save_encoder(directory: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        untyped: Any = BertForMaskedLM(config)
    untyped.save_pretrained(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tells", [True, False])
def test_load_model_refuses_an_encoder_when_precision_hides_what_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tells: bool
) -> None:
    """By what its modules say of themselves, and by its logits if they said nothing."""
    _save_encoder(tmp_path)
    # Its configuration says so, too.
    monkeypatch.setattr("executor_service.checkpoint.model_loader.check_kind", lambda *_: None)
    if not tells:
        monkeypatch.setattr(
            "executor_service.model.transformers_attention._refuse_unknown_arguments",
            lambda *_, **__: None,
        )
    reason = "is not causal" if tells else r"differ from those of transformers .* in torch\.float32"
    with pytest.raises(ModelUnsupported, match=reason):
        load_model(ModelConfig(str(tmp_path), dtype=dtype, task="generate"))


def test_load_model_takes_the_positions_of_the_decoder_of_an_encoder(
    tmp_path: Path,
) -> None:
    from transformers import WhisperConfig, WhisperForCausalLM

    config = WhisperConfig(
        vocab_size=160,
        d_model=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        max_target_positions=96,
        pad_token_id=0,
        is_encoder_decoder=False,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    untyped: Any = WhisperForCausalLM(config)
    untyped.save_pretrained(tmp_path)
    assert load_model(ModelConfig(str(tmp_path))).max_model_len == 96


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_load_model_refuses_when_far_positions_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Positions that no prompt of a trial would reach."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def differ(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:  # noqa: ANN401
        if self.config._attn_implementation != "eager":
            is_far = kwargs["position_ids"] >= 300
            hidden_states = hidden_states * torch.where(is_far, 1.01, 1.0)[..., None].to(
                hidden_states.dtype
            )
        return forward(self, hidden_states, **kwargs)

    make_tiny_model("llama", tmp_path, overrides={"initializer_range": 0.05})
    monkeypatch.setattr(LlamaAttention, "forward", differ)
    with pytest.raises(ModelUnsupported, match=r"differ from .* in torch\.float32"):
        load_model(ModelConfig(str(tmp_path), dtype=dtype))
    assert load_model(ModelConfig(str(tmp_path), dtype=dtype, max_model_len=299))


@pytest.mark.parametrize(
    "architectures",
    [
        None,
        [],
        "LlamaForCausalLM",
        ["LlamaForCausalLM"],
        ["LLaMAForCausalLM"],
        ["X", "LlamaForCausalLM"],
    ],
)
def test_load_model_serves_the_class_of_the_model_type(
    tmp_path: Path, architectures: object
) -> None:
    make_tiny_model("llama", tmp_path)
    edit_json(tmp_path / "config.json", architectures=architectures)
    assert load_model(ModelConfig(str(tmp_path))).architecture == "LlamaForCausalLM"


def test_load_model_runs_no_custom_code_when_the_checkpoint_brings_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model("llama", tmp_path)
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('custom code is run')")
    own = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.LlamaForCausalLM"}
    edit_json(tmp_path / "config.json", auto_map=own)
    caplog.set_level(logging.INFO, "executor_service")
    assert load_model(ModelConfig(str(tmp_path))).architecture == "LlamaForCausalLM"
    assert "custom_code_not_run model_type=llama" in caplog.text
