"""What is no causal language model is refused by name, before weights are read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.errors import ModelUnsupported
from tests.support.models.tiny_models import make_tiny_model
from tests.unit.executor.checkpoint.refusals import SMALL_SIZES, refusal, write_checkpoint


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
def test_load_model_serves_when_the_class_is_that_of_the_model_type(
    tmp_path: Path, architectures: object
) -> None:
    make_tiny_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    assert load_model(ModelConfig(str(tmp_path))).architecture == "LlamaForCausalLM"


_ENCODER = "bidirectional encoder"
_KINDS = [
    # Encoders, by flag, by class, or by both.
    ({"model_type": "bert"}, _ENCODER),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, _ENCODER),
    ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": False}, _ENCODER),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"], "is_decoder": True}, _ENCODER),
    ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, _ENCODER),
    ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}, _ENCODER),
    ({"model_type": "electra", "architectures": ["ElectraForPreTraining"]}, _ENCODER),
    ({"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}, _ENCODER),
    ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, _ENCODER),
    ({"model_type": "albert", "architectures": ["AlbertForMaskedLM"]}, _ENCODER),
    ({"model_type": "llama", "architectures": ["LlamaForMaskedLM"]}, _ENCODER),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, _ENCODER),
    ({"model_type": "qwen2", "is_causal": False}, _ENCODER),
    ({"model_type": "bert-generation"}, _ENCODER),
    # With an encoder, or made to have one.
    ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
    ({"model_type": "bart", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"model_type": "whisper", "is_encoder_decoder": True}, "encoder-decoder"),
    (
        {"model_type": "bart", "architectures": ["BartForCausalLM"], "is_encoder_decoder": False},
        "decoder half of an encoder-decoder",
    ),
    (
        {
            "model_type": "marian",
            "architectures": ["MarianForCausalLM"],
            "is_encoder_decoder": False,
        },
        "decoder half of an encoder-decoder",
    ),
    # Without a head for tokens.
    ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "classifier"),
    ({"model_type": "qwen2", "architectures": ["Qwen2ForTokenClassification"]}, "token classifier"),
    ({"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, "reward model"),
    ({"model_type": "mistral", "architectures": ["MistralForQuestionAnswering"]}, "answerer"),
    ({"model_type": "mistral", "architectures": ["MistralModel"]}, "embedding models"),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3 head"),
    ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "no causal language"),
    # One model's code under the name of another.
    ({"model_type": "llama", "architectures": ["MistralForCausalLM"]}, "other code than that"),
    (
        {
            "model_type": "llama",
            "architectures": ["MyForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_my.MyForCausalLM"},
        },
        "custom code, which is never run",
    ),
]


@pytest.mark.usefixtures("reads_no_weights")
@pytest.mark.parametrize(("config", "kind"), _KINDS)
def test_load_model_says_what_it_is_when_it_is_no_causal_language_model(
    tmp_path: Path, config: Mapping[str, Any], kind: str
) -> None:
    write_checkpoint(tmp_path, config)
    text = refusal(tmp_path)
    assert text.startswith(f"{config['model_type']}: ")
    assert kind in text
    for name in config.get("architectures", []):
        assert name in text
    assert ": not served; served would be a decoder-only causal language model" in text


@pytest.mark.parametrize("model_type", ["roberta", "camembert", "xlm-roberta-xl"])
def test_load_model_says_so_when_positions_do_not_begin_at_0(
    tmp_path: Path, model_type: str
) -> None:
    write_checkpoint(tmp_path, {"model_type": model_type, "is_decoder": True})
    text = refusal(tmp_path)
    assert "its positions begin behind pad_token_id, not at 0: not served; served would be" in text


@pytest.mark.usefixtures("reads_no_weights")
@pytest.mark.parametrize(
    ("config", "parts", "text_part"),
    [
        (
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            "vision_config",
            "its text part alone would be, saved as a checkpoint of LlamaForCausalLM",
        ),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
            "vision_config",
            "its text part alone would be, saved as a checkpoint of MistralForCausalLM",
        ),
        (
            {"model_type": "qwen2_audio", "text_config": {"model_type": "qwen2"}},
            "audio_config",
            "its text part alone would be, saved as a checkpoint of Qwen2ForCausalLM",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "mamba"}},
            "vision_config",
            "nor would its text part be (mamba: linear attention keeps a recurrent state",
        ),
        ({"model_type": "clip"}, "vision_config", "served would be a decoder-only causal"),
    ],
)
def test_load_model_judges_the_text_part_when_it_is_multimodal(
    tmp_path: Path, config: Mapping[str, Any], parts: str, text_part: str
) -> None:
    write_checkpoint(tmp_path, {**config, "architectures": ["SomeForConditionalGeneration"]})
    text = refusal(tmp_path)
    assert f"multimodal model (with {parts}) (SomeForConditionalGeneration): not served" in text
    assert text_part in text


@pytest.mark.usefixtures("asks_no_transformers")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"auto_map": {"AutoConfig": "configuration_x.X"}},
            "custom code (auto_map), which is never",
        ),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_x.X"}},
            "model_type 'mine' is custom code (auto_map), which is never run: not served",
        ),
        ({"model_type": "mine"}, "model_type 'mine' is unknown to transformers"),
        ({}, "model_type None is not the name of one: not served"),
        ({"model_type": ["llama"]}, "is not the name of one: not served"),
    ],
)
def test_load_model_never_runs_custom_code_when_the_type_is_unknown(
    tmp_path: Path, config: Mapping[str, Any], message: str
) -> None:
    (tmp_path / "configuration_x.py").write_text("raise SystemExit('custom code is run')")
    write_checkpoint(tmp_path, config)
    assert message in refusal(tmp_path)


def test_load_model_runs_the_code_of_transformers_when_the_checkpoint_brings_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model("llama", tmp_path)
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('custom code is run')")
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.LlamaForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": own}))
    caplog.set_level(logging.INFO, "executor_service")
    assert load_model(ModelConfig(str(tmp_path))).architecture == "LlamaForCausalLM"
    assert "custom_code_not_run model_type=llama" in caplog.text


def test_load_model_refuses_as_unsupported_when_it_is_another_kind(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model_type": "bert"})
    with pytest.raises(ModelUnsupported):
        load_model(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize("model_class", ["BertForMaskedLM", "BertLMHeadModel"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_model_refuses_an_encoder_when_its_weights_are_gentle(
    tmp_path: Path, model_class: str, dtype: str
) -> None:
    """Rounding hides what a token of a gentle model sees of later ones."""
    import transformers

    config = transformers.BertConfig(
        **SMALL_SIZES, intermediate_size=16, max_position_embeddings=64
    )
    getattr(transformers, model_class)(config).save_pretrained(tmp_path)
    with pytest.raises(
        ModelUnsupported, match="bidirectional encoder, whose tokens see later ones"
    ) as caught:
        load_model(ModelConfig(str(tmp_path), dtype=dtype))
    assert "\n" not in str(caught.value)
