"""Checkpoints that are refused: in one line that names what they are, before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ExecutorError, ModelUnsupported

Write = Callable[[Path], None]
SMALL_SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 16,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL_SIZES}
KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


@pytest.fixture
def reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_args: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("executor_service.checkpoint.model_loader.read_model", read)


@pytest.fixture
def asks_no_transformers(monkeypatch: pytest.MonkeyPatch, reads_no_weights: None) -> None:
    def read(*_args: object) -> None:
        raise AssertionError("transformers is asked")

    monkeypatch.setattr("executor_service.checkpoint.model_loader._read_config", read)


def refusal(directory: Path, task: str = "auto") -> str:
    """The one line that `directory` is refused with; it may not hint at what would not help."""
    with pytest.raises(ExecutorError) as caught:
        load_model(ModelConfig(str(directory), task=task))
    text = str(caught.value)
    assert "\n" not in text
    for bad_advice in ("optimum", "trust_remote_code", "pip install", "Traceback"):
        assert bad_advice not in text
    return text


def write_checkpoint(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(2, 2)}, directory / "model.safetensors")


def _config(config: Mapping[str, Any], *files: str) -> Write:
    """Writes a checkpoint with this config.json, and empty `files` beside it."""

    def write(directory: Path) -> None:
        write_checkpoint(directory, config)
        _touch(*files)(directory)

    return write


def _touch(*names: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for name in names:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")

    return write


def _adapter(directory: Path, base: str | None = "some-org/some-model") -> None:
    content = {"peft_type": "LORA", "base_model_name_or_path": base}
    (directory / "adapter_config.json").write_text(json.dumps(content))
    (directory / "adapter_model.safetensors").touch()


def _adapter_and_weights(directory: Path) -> None:
    _adapter(directory)
    write_checkpoint(directory, LLAMA)


NO_CHECKPOINTS: list[tuple[Write, str]] = [
    (lambda _: None, "config.json is missing: an empty directory, not served"),
    (_adapter, "LORA adapter of the model some-org/some-model"),
    (lambda directory: _adapter(directory, None), "adapter of the model that it does not name"),
    (_adapter_and_weights, "next to the weights of a model, not served together"),
    (_touch("adapter_config.json"), "PEFT adapter of the model that it does not name"),
    (_touch("a.gguf", "b.gguf"), "2 GGUF models (a.gguf, b.gguf), not served"),
    (
        _touch("config.json", "m-00001-of-00003.gguf", "m-00003-of-00003.gguf"),
        "1 of 3 files of a GGUF model are missing, the first is m-00002-of-00003.gguf",
    ),
    (_touch("m-00002-of-00002.gguf"), "the first is m-00001-of-00002.gguf"),
    (
        _touch("mmproj-model-f16.gguf", "README.md"),
        "an image encoder of llama.cpp without a model (mmproj-model-f16.gguf), not served",
    ),
    (_touch("config.json", "weights.ggml"), "GGML weights (weights.ggml), not served"),
    (_touch("params.json", "consolidated.00.pth"), "weights in their publisher's format"),
    (_touch("params.json", "consolidated.safetensors"), "weights in their publisher's format"),
    (_touch("model_index.json", "unet/config.json"), "a diffusers pipeline"),
    (_touch("config.json", "model.onnx"), "an ONNX export (model.onnx), not served"),
    (_touch("config.json", "onnx/model.onnx"), "an ONNX export (onnx), not served"),
    (_touch("config.json", "tf_model.h5"), "TensorFlow weights (tf_model.h5), not served"),
    (_touch("config.json", "flax_model.msgpack"), "Flax weights"),
    (_touch("tokenizer.json", "tokenizer_config.json"), "a tokenizer without a model"),
    (_touch("config.json", "tokenizer.json"), "no weights (neither model.safetensors nor"),
    (_touch("README.md"), "config.json is missing; found: README.md, not served"),
    (_touch("snapshots/12/config.json", "snapshots/12/model.safetensors"), "did you mean"),
]

UNKNOWN_METHODS: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "hqq", "nbits": 4}}, "hqq with 4 bits"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "modelopt"),
    ({"quantization_config": {"quant_method": "not-invented-yet"}}, "not-invented-yet"),
    ({"quantization_config": {"group_size": 32}}, "by a method that it does not name"),
    ({"quantization_config": {}}, "by a method that it does not name"),
    ({"quantization_config": "gptq"}, 'quantization_config "gptq"'),
    # MLX.
    ({"quantization": {"group_size": 64, "bits": 4}}, "with 4 bits (quantization)"),
    ({"text_config": {"quantization_config": {"quant_method": "aqlm"}}}, "aqlm"),
]

UNKNOWN_VARIANTS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 5}, "bits is 5, not served; supported: 2, 3, 4, 8"),
    (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "supported: gptq, gptq_v2",
    ),
    ({"quant_method": "awq", "w_bit": 4, "version": "gemv"}, "version is gemv, not served"),
    ({"quant_method": "awq", "bits": 3}, "bits is 3, not served; supported: 4"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128, not served"),
    ({"quant_method": "compressed-tensors"}, "config_groups is missing, not served"),
]

# Declared, but the only tensor of the checkpoint is plain.
WITHOUT_CODES: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "awq", "w_bit": 4},
    {"quant_method": "fp8"},
    {"quant_method": "mxfp4"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"load_in_8bit": True},
]

KV_SCHEMES: list[dict[str, Any]] = [
    {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
    {"kv_cache_scheme": {**KV_SCHEME, "num_bits": 4}},
    {"kv_cache_scheme": {**KV_SCHEME, "type": "int"}},
    {"kv_cache_scheme": {**KV_SCHEME, "strategy": "channel"}},
    {"kv_cache_scheme": {**KV_SCHEME, "dynamic": True}},
    {"kv_cache_scheme": {**KV_SCHEME, "symmetric": False}},
    {"kv_cache_scheme": None},
    {"sparsity_config": {"format": "sparse-24-bitmask"}},
    {"quant_method": "another"},
]

CUSTOM_CODE: list[tuple[dict[str, Any], str]] = [
    (
        {"auto_map": {"AutoConfig": "configuration_x.X"}},
        "custom code (auto_map), which is never",
    ),
    (
        {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_x.X"}},
        "model_type 'mine' is custom code (auto_map), which is never run: not served",
    ),
    ({"model_type": "mine"}, "model_type 'mine' is unknown to transformers"),
    ({}, "model_type None is not a string: not served"),
    ({"model_type": ["llama"]}, "is not a string: not served"),
]

BEFORE_TRANSFORMERS: list[tuple[Write, tuple[str, ...]]] = [
    *((write, (message,)) for write, message in NO_CHECKPOINTS),
    *(
        (_config({**LLAMA, **changes}), ("quantised", named, "not served; supported: awq, bits"))
        for changes, named in UNKNOWN_METHODS
    ),
    *(
        (_config({**LLAMA, "quantization_config": declared}), ("quantised with", message))
        for declared, message in UNKNOWN_VARIANTS
    ),
    *(
        (
            _config({**LLAMA, "quantization_config": declared}),
            (
                f"quantised with {declared.get('quant_method', 'bitsandbytes')}, but no tensor of"
                " the weights is, not served; supported: this checkpoint without",
            ),
        )
        for declared in WITHOUT_CODES
    ),
    (_config(LLAMA, "hf_quant_config.json"), ("modelopt (hf_quant_config.json), not served",)),
    (_config(LLAMA, "quant_config.json"), ("quantised with awq: ", "bits is None")),
    (_config(LLAMA, "quantize_config.json"), ("quantised with gptq: ", "bits is None")),
    # More than one scale for keys and values.
    *(
        (
            _config(
                {
                    **LLAMA,
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "config_groups": {},
                        "kv_cache_scheme": KV_SCHEME,
                        **changes,
                    },
                }
            ),
            ("quantised",),
        )
        for changes in KV_SCHEMES
    ),
    *((_config(config), (message,)) for config, message in CUSTOM_CODE),
]


@pytest.mark.usefixtures("asks_no_transformers")
@pytest.mark.parametrize(("write", "said"), BEFORE_TRANSFORMERS)
def test_load_model_refuses_before_it_asks_transformers(
    tmp_path: Path, write: Write, said: tuple[str, ...]
) -> None:
    (tmp_path / "configuration_x.py").write_text("raise SystemExit('custom code is run')")
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    write(directory)
    text = refusal(directory)
    assert [part for part in said if part not in text] == []
    assert any(words in text for words in ("supported:", "did you mean"))


ENCODER = "bidirectional encoder"
KINDS: list[tuple[dict[str, Any], str]] = [
    # Encoders, by flag, by class, or by both.
    ({"model_type": "bert"}, ENCODER),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ENCODER),
    ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": False}, ENCODER),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"], "is_decoder": True}, ENCODER),
    ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, ENCODER),
    ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}, ENCODER),
    ({"model_type": "electra", "architectures": ["ElectraForPreTraining"]}, ENCODER),
    ({"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}, ENCODER),
    ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, ENCODER),
    ({"model_type": "albert", "architectures": ["AlbertForMaskedLM"]}, ENCODER),
    ({"model_type": "llama", "architectures": ["LlamaForMaskedLM"]}, ENCODER),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, ENCODER),
    ({"model_type": "qwen2", "is_causal": False}, ENCODER),
    ({"model_type": "bert-generation"}, ENCODER),
    # With an encoder, or made to have one.
    (
        {"model_type": "t5", "architectures": ["T5ForQuestionAnswering"]},
        "encoder-decoder",
    ),
    (
        {
            "model_type": "bart",
            "architectures": ["BartForSequenceClassification"],
            "is_encoder_decoder": True,
        },
        "encoder-decoder",
    ),
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
    (
        {"model_type": "mistral", "architectures": ["MistralForQuestionAnswering"]},
        "question answering",
    ),
    ({"model_type": "mistral", "architectures": ["MistralModel"]}, "embedding models"),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3 head"),
    (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        "not a causal language",
    ),
    # One model's code under the name of another.
    ({"model_type": "llama", "architectures": ["MistralForCausalLM"]}, "code other than that"),
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
@pytest.mark.parametrize(("config", "kind"), KINDS)
def test_load_model_names_the_kind_of_other_models_when_it_must_generate(
    tmp_path: Path, config: Mapping[str, Any], kind: str
) -> None:
    write_checkpoint(tmp_path, config)
    text = refusal(tmp_path, task="generate")
    assert text.startswith(f"{config['model_type']}: ")
    for part in (kind, *config.get("architectures", [])):
        assert part in text
    assert ": not served; supported: a decoder-only causal language model" in text


@pytest.mark.parametrize("model_type", ["roberta", "camembert", "xlm-roberta-xl"])
def test_load_model_says_so_when_positions_do_not_begin_at_0(
    tmp_path: Path, model_type: str
) -> None:
    write_checkpoint(tmp_path, {"model_type": model_type, "is_decoder": True})
    text = refusal(tmp_path)
    assert "positions start after pad_token_id, not at 0: not served; supported:" in text


@pytest.mark.usefixtures("reads_no_weights")
@pytest.mark.parametrize(
    ("config", "parts", "text_part"),
    [
        (
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            "vision_config",
            "supported: its text part alone, saved as a checkpoint of LlamaForCausalLM",
        ),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
            "vision_config",
            "supported: its text part alone, saved as a checkpoint of MistralForCausalLM",
        ),
        (
            {"model_type": "qwen2_audio", "text_config": {"model_type": "qwen2"}},
            "audio_config",
            "supported: its text part alone, saved as a checkpoint of Qwen2ForCausalLM",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "mamba"}},
            "vision_config",
            "nor is its text part supported (mamba: linear attention keeps a recurrent state",
        ),
        ({"model_type": "clip"}, "vision_config", "supported: a decoder-only causal"),
    ],
)
def test_load_model_judges_the_text_part_when_it_is_multimodal(
    tmp_path: Path, config: Mapping[str, Any], parts: str, text_part: str
) -> None:
    write_checkpoint(tmp_path, {**config, "architectures": ["SomeForConditionalGeneration"]})
    text = refusal(tmp_path)
    assert f"multimodal model (with {parts}) (SomeForConditionalGeneration): not served" in text
    assert text_part in text


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
        ModelUnsupported, match="bidirectional encoder, whose tokens attend to later ones"
    ) as caught:
        load_model(ModelConfig(str(tmp_path), dtype=dtype, task="generate"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("m.ggml", "GGML weights, not served; supported: a GGUF file, or"), ("m.bin", "a file, not")],
)
def test_load_model_says_what_it_is_when_a_file_is_given(
    tmp_path: Path, name: str, kind: str
) -> None:
    (tmp_path / name).touch()
    assert kind in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", {"base_model_name_or_path": "some-org/some-model"}),
        ("model_index.json", {}),
        ("config.json", {**LLAMA, "quantization_config": {"quant_method": "hqq"}}),
    ],
)
def test_load_model_downloads_no_weights_when_small_files_rule_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: Mapping[str, Any]
) -> None:
    def download(_model: str, *, allow_patterns: list[str]) -> str:
        assert "*.safetensors" not in allow_patterns
        (tmp_path / name).write_text(json.dumps(content))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ExecutorError, match="not served"):
        load_model(ModelConfig("some-org/no-such-model"))


@pytest.mark.parametrize("name", ["../model.safetensors", "", 3, None, ["a"]])
def test_load_model_refuses_when_the_index_names_no_file(tmp_path: Path, name: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lm_head.weight is in " in refusal(tmp_path)


def test_load_model_goes_on_when_the_quantization_is_null(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**LLAMA, "quantization_config": None})
    assert "quantised" not in refusal(tmp_path)


@pytest.mark.usefixtures("asks_no_transformers")
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("layers.0.q_proj.weight", torch.zeros(2, 2, dtype=torch.float8_e4m3fn)),
        ("layers.0.q_proj.weight_scale", torch.zeros(2, dtype=torch.float8_e8m0fnu)),
        ("layers.0.q_proj.weight", torch.zeros(2, 2, dtype=torch.int8)),
        ("layers.0.q_proj.weight", torch.zeros(2, 1, dtype=torch.uint8)),
        ("layers.0.q_proj.qweight", torch.zeros(2, 2, dtype=torch.int32)),
        ("layers.0.q_proj.weight_packed", torch.zeros(2, 2, dtype=torch.int32)),
        ("layers.0.experts.gate_up_proj_blocks", torch.zeros(2, 2, 2, dtype=torch.uint8)),
        ("layers.0.experts.down_proj", torch.zeros(2, 2, 2, dtype=torch.int8)),
    ],
)
def test_load_model_refuses_quantised_weights_when_the_config_is_silent(
    tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    write_checkpoint(tmp_path, LLAMA)
    save_file({name: tensor}, tmp_path / "model.safetensors")
    assert f"quantised, but config.json does not say how: {name} is " in refusal(tmp_path)


@pytest.mark.usefixtures("asks_no_transformers")
def test_load_model_refuses_quantised_weights_when_the_config_names_another_format(
    tmp_path: Path,
) -> None:
    declared = {"quant_method": "gptq", "bits": 4}
    write_checkpoint(tmp_path, {**LLAMA, "quantization_config": declared})
    codes = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
    save_file({"layers.0.up_proj.weight": codes}, tmp_path / "model.safetensors")
    message = (
        "quantised, but config.json names gptq: layers.0.up_proj.weight is F8_E4M3, not served"
    )
    assert message in refusal(tmp_path)
