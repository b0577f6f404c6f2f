"""Models in GGUF files, compared with the models of `transformers` that they were written from."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from torch import Tensor

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.quantization import gguf_config, read_gguf
from tests.support.models.gguf_writer import write_gguf
from tests.support.models.tiny_models import SLIDING_WINDOW, make_tiny_model

EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
WINDOW = {"attention.sliding_window": SLIDING_WINDOW}
OSS = {**WINDOW, **EXPERTS, "expert_feed_forward_length": 96}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
YARN_SETTINGS = {
    "rope.freq_base": 1e4,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 24,
}
# Architecture of transformers, its options, architecture of llama.cpp, metadata.
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("llama", {}, "llama", {"rope.freq_base": 10000.0}),
    ("llama", {"tie_word_embeddings": True}, "llama", {}),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
        "llama",
        {"rope.freq_base": 1000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    ("mistral", {"sliding_window": None}, "llama", {}),
    ("mixtral", {}, "llama", {**EXPERTS, "rope.freq_base": 1e6}),
    ("qwen2", {}, "qwen2", {}),
    ("qwen3", {}, "qwen3", {}),
    ("qwen3", {"rope_parameters": YARN | {"rope_theta": 1e4}}, "qwen3", YARN_SETTINGS),
    ("qwen3_moe", {"norm_topk_prob": True}, "qwen3moe", EXPERTS),
    (
        "gemma2",
        {},
        "gemma2",
        {**WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    ),
    (
        "gemma3_text",
        {"num_hidden_layers": 7, "query_pre_attn_scalar": 16},
        "gemma3",
        {**WINDOW, "rope.freq_base": 1e6},
    ),
    ("phi3", {}, "phi3", WINDOW),
    (
        "smollm3",
        {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
        "smollm3",
        {"rope.freq_base": 2e6},
    ),
    ("gpt_oss", {}, "gpt-oss", OSS),
    (
        "gpt_oss",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False}},
        "gpt-oss",
        {**OSS, **YARN_SETTINGS},
    ),
]


def plain_model(folder: Path, architecture: str, options: dict[str, Any]) -> Any:  # noqa: ANN401
    make_tiny_model(architecture, folder, overrides=options)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def logits(model: Any, num_tokens: int = 90) -> Tensor:  # noqa: ANN401
    generator = torch.Generator().manual_seed(3)
    model.set_attn_implementation("eager")  # and not ours, which needs pages
    tokens = torch.randint(2, model.config.vocab_size, (2, num_tokens), generator=generator)
    found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("architecture", "options", "gguf_architecture", "settings"),
    CASES,
    ids=[f"{case[0]}-{index}" for index, case in enumerate(CASES)],
)
def test_model_in_file_has_the_logits_of_its_original(
    tmp_path: Path,
    architecture: str,
    options: dict[str, Any],
    gguf_architecture: str,
    settings: dict[str, Any],
) -> None:
    model = plain_model(tmp_path / "plain", architecture, options)
    path = tmp_path / "model.gguf"
    metadata = {f"{gguf_architecture}.{key}": value for key, value in settings.items()}
    write_gguf(path, model, gguf_architecture, metadata)

    loaded = load_model(ModelConfig(str(path), dtype="float32"))

    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)
    assert loaded.name == "model"


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_matrices_are_those_that_gguf_reads(tmp_path: Path, type_name: str) -> None:
    model = plain_model(tmp_path / "plain", "llama", {})
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", {}, type_name=type_name)

    loaded = load_model(ModelConfig(str(path), dtype="float32"))

    expected = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()

    kind = GGMLQuantizationType[type_name]
    held = quants.dequantize(quants.quantize(expected, kind), kind)
    weights: Any = loaded.model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(weights.numpy(), held)


@pytest.mark.parametrize(
    ("architecture", "gguf_architecture", "settings", "type_name"),
    [("gpt_oss", "gpt-oss", OSS, "MXFP4"), ("qwen3_moe", "qwen3moe", EXPERTS, "Q4_0")],
)
def test_experts_are_those_that_gguf_reads(
    tmp_path: Path,
    architecture: str,
    gguf_architecture: str,
    settings: dict[str, Any],
    type_name: str,
) -> None:
    model = plain_model(tmp_path / "plain", architecture, {"hidden_size": 64})
    path = tmp_path / "model.gguf"
    metadata = {f"{gguf_architecture}.{key}": value for key, value in settings.items()}
    write_gguf(path, model, gguf_architecture, metadata, type_name=type_name)
    stored = {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in GGUFReader(path).tensors
        if "_exps.weight" in tensor.name
    }

    loaded: Any = load_model(ModelConfig(str(path), dtype="float32")).model

    own = loaded.state_dict()
    down = own["model.layers.1.mlp.experts.down_proj"]
    gate_up = own["model.layers.1.mlp.experts.gate_up_proj"]
    if architecture == "gpt_oss":
        down, gate_up = down.transpose(1, 2), gate_up.transpose(1, 2)
        gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=1)
    for name, tensor in (("gate", gate), ("up", up), ("down", down)):
        np.testing.assert_array_equal(tensor.numpy(), stored[f"blk.1.ffn_{name}_exps.weight"])


def test_long_positions_have_factors_of_their_own_when_the_file_has_them(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [2.0 + index for index in range(8)],
        "short_factor": [1.0 + index / 8 for index in range(8)],
        "original_max_position_embeddings": 40,
    }
    options = {"rope_parameters": rope, "original_max_position_embeddings": 40}
    model = plain_model(tmp_path / "plain", "phi3", options)
    path = tmp_path / "model.gguf"
    settings = {**WINDOW, "rope.scaling.original_context_length": 40, "rope.freq_base": 1e4}
    write_gguf(
        path,
        model,
        "phi3",
        {f"phi3.{key}": value for key, value in settings.items()},
        extra={
            f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"])
            for kind in ("long", "short")
        },
    )

    found = gguf_config(read_gguf(path))

    assert found["original_max_position_embeddings"] == 40
    assert {key: found["rope_parameters"][key] for key in rope} == rope
    plain, own = (
        load_model(ModelConfig(str(each), dtype="float32", max_model_len=40))
        for each in (tmp_path / "plain", path)
    )
    torch.testing.assert_close(logits(own.model), logits(plain.model), rtol=1e-4, atol=1e-4)


def test_model_is_read_from_a_set_of_files_in_a_folder(tmp_path: Path) -> None:
    path = tiny_file(tmp_path, max_tensors=9)
    names = [each.name for each in sorted(tmp_path.glob("*.gguf"))]
    assert names == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32
    )

    assert not path.exists()
    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32"))

    torch.testing.assert_close(logits(loaded.model), logits(model.eval()), rtol=1e-4, atol=1e-4)
    assert loaded.name == "model"


def llama3_factors(factor: float, theta: float, head_dim: int) -> Tensor:
    """Returns the factors that llama.cpp's converter computes for Llama 3.1."""
    factors = []
    for index in range(0, head_dim, 2):
        length = 2 * np.pi * theta ** (index / head_dim)
        if length < 8192 / 4.0:
            factors.append(1.0)
        elif length > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)


def test_scaling_of_llama_3_is_found_in_its_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = plain_model(tmp_path / "plain", "llama", {"rope_parameters": rope})
    path = tmp_path / "model.gguf"
    factors = llama3_factors(32.0, 500000.0, 16)
    settings = {"llama.rope.freq_base": 500000.0}
    write_gguf(path, model, "llama", settings, extra={"rope_freqs.weight": factors})

    assert gguf_config(read_gguf(path))["rope_parameters"] == rope
    loaded = load_model(ModelConfig(str(path), dtype="float32"))
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)


def tiny_file(folder: Path, architecture: str = "llama", **arguments: Any) -> Path:  # noqa: ANN401
    model = plain_model(folder / "plain", "llama", {})
    write_gguf(folder / "model.gguf", model, architecture, {}, **arguments)
    return folder / "model.gguf"


def test_file_is_refused_when_it_is_truncated(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])

    with pytest.raises(ModelUnreadable, match=r"model.gguf: truncated, \d+ bytes where .* ends"):
        load_model(ModelConfig(str(path)))


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 200])
def test_file_is_refused_when_its_header_is_cut_off(tmp_path: Path, num_bytes: int) -> None:
    path = tiny_file(tmp_path)
    path.write_bytes(path.read_bytes()[:num_bytes])

    with pytest.raises(ModelUnreadable, match=r"model\.gguf"):
        load_model(ModelConfig(str(path)))


def test_file_is_read_or_refused_when_bytes_of_its_header_are_changed(tmp_path: Path) -> None:
    original = tiny_file(tmp_path).read_bytes()
    generator = random.Random(1)
    path = tmp_path / "changed.gguf"
    num_refused = 0
    for _ in range(400):
        content = bytearray(original)
        for _ in range(generator.choice((1, 2, 4))):
            content[generator.randrange(2000)] = generator.choice((0, 1, 9, 255))
        path.write_bytes(content)
        try:
            gguf_config(read_gguf(path))
        except (ModelUnreadable, ModelUnsupported):
            num_refused += 1
    assert num_refused > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.alignment": 0}, "general.alignment is 0; allowed: a positive integer"),
        ({"llama.attention.head_count": 0}, "the metadata describe no model"),
        ({"llama.embedding_length": "wide"}, "the metadata describe no model"),
    ],
)
def test_file_is_refused_when_its_metadata_are_nonsensical(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = plain_model(tmp_path / "plain", "llama", {})
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", change)

    with pytest.raises(ModelUnreadable, match=message):
        load_model(ModelConfig(str(path)))


def test_file_is_refused_when_its_factors_are_of_no_known_scaling(tmp_path: Path) -> None:
    path = tiny_file(tmp_path, extra={"rope_freqs.weight": torch.full((8,), 3.0)})

    with pytest.raises(ModelUnsupported, match="factors of no known scaling"):
        load_model(ModelConfig(str(path)))


def test_file_is_refused_when_a_tensor_has_no_place(tmp_path: Path) -> None:
    path = tiny_file(tmp_path, extra={"blk.0.ssm_a": torch.ones(8)})

    with pytest.raises(ModelUnreadable, match=r"has no place for blk\.0\.ssm_a"):
        load_model(ModelConfig(str(path)))


def test_file_is_refused_when_it_lacks_a_tensor(tmp_path: Path) -> None:
    path = tiny_file(tmp_path, left_out=["blk.1.ffn_up.weight"])

    with pytest.raises(ModelUnreadable, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(ModelConfig(str(path)))


def test_file_is_refused_when_a_tensor_does_not_fit_the_metadata(tmp_path: Path) -> None:
    model = plain_model(tmp_path / "plain", "llama", {})
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", {"llama.feed_forward_length": 64})

    with pytest.raises(
        ModelUnreadable, match=r"down_proj\.weight has shape \[64, 96\] where .* implies \[64, 64\]"
    ):
        load_model(ModelConfig(str(path)))


def test_file_is_refused_when_blocks_do_not_divide_the_rows_of_a_tensor(tmp_path: Path) -> None:
    path = tiny_file(tmp_path, type_name="Q8_0")
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4
    assert content[at : at + 8] == struct.pack("<Q", 96)
    content[at : at + 8] = struct.pack("<Q", 95)
    path.write_bytes(content)

    with pytest.raises(
        ModelUnreadable,
        match=r"blk\.0\.ffn_down\.weight have 95 numbers, .* multiple of 32",
    ):
        load_model(ModelConfig(str(path)))


def small_file(path: Path, metadata: dict[str, str], kind: GGMLQuantizationType) -> None:
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_string(key, value)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    rows = np.zeros((2, 256 // block_size * block_bytes), np.uint8)
    writer.add_tensor("token_embd.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        ("IQ2_XXS", {}, r"token_embd\.weight has type IQ2_XXS, not served; supported: F32, F16"),
        (
            "Q8_0",
            {"general.type": "adapter"},
            "general.type is adapter, not served; supp",
        ),
    ],
)
def test_file_is_refused_when_its_content_is_not_read(
    tmp_path: Path, kind: str, metadata: dict[str, str], message: str
) -> None:
    path = tmp_path / "model.gguf"
    small_file(path, metadata, GGMLQuantizationType[kind])

    with pytest.raises(ModelUnsupported, match=message):
        load_model(ModelConfig(str(path)))


@pytest.mark.parametrize("architecture", ["clip", "mamba"])
def test_file_is_refused_when_its_architecture_is_not_read(
    tmp_path: Path, architecture: str
) -> None:
    path = tiny_file(tmp_path, architecture)

    with pytest.raises(
        ModelUnsupported, match=f"general.architecture is {architecture}, not served; supported: "
    ):
        load_model(ModelConfig(str(path)))


def test_file_is_refused_when_layers_have_numbers_of_their_own(tmp_path: Path) -> None:
    model = plain_model(tmp_path / "plain", "llama", {})
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", {"llama.attention.head_count_kv": [2, 1]})

    with pytest.raises(ModelUnsupported, match=r"head_count_kv differs between layers, not served"):
        load_model(ModelConfig(str(path)))


def test_set_of_files_is_refused_when_one_is_missing(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    part = path.with_name("model-00001-of-00002.gguf")
    path.rename(part)

    with pytest.raises(ModelUnreadable, match=r"1 of 2 files .* the first is model-00002"):
        load_model(ModelConfig(str(part)))
