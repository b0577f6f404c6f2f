"""Adapters in models that `transformers` runs: logits are those of PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.adapters import read_adapter
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import pack_linears
from executor_service.model import Adapter, attending_with, quantized_linears, takes_adapters
from splitserve_kernels.cpu import NativeAttention, NativeLibrary
from tests.support.models.gguf_writer import round_matrices, write_gguf
from tests.support.models.peft_adapters import files_of, logits_of, make_adapter
from tests.support.models.tiny_models import load_tiny_model, make_tiny_model
from tests.unit.executor.adapters.adapted_rows import (
    TOKENS,
    TOLERANCE,
    Served,
    difference,
    plain_model,
)

TEXTS = (TOKENS, TOKENS, [88, 3, 14, 15, 92, 65], [7, 17, 42])
# Least effect of an adapter, relative to the largest logit.
CHANGE = 0.01

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
_OF_TEXT = r".*language_model.*\.(q|k|down)_proj"
ALL: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
SOME = {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}
HEADS = {"r": 2, "target_modules": ["embed_tokens", "v_proj", "lm_head"]}
OWN = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
EXPERTS = {
    "r": 3,
    "use_rslora": True,
    "target_modules": [],
    "target_parameters": ["mlp.experts.down_proj"],
}
GATES = {"r": 2, "target_modules": [], "target_parameters": ["1.mlp.experts.gate_up_proj"]}
_OF_GPT_OSS = ["experts.gate_up_proj", "0.mlp.experts.down_proj", "router.weight", "q_proj.weight"]

# Architecture, overrides of its configuration, and two adapters.
CASES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, ALL, SOME),
    "llama_heads": ("llama", {}, HEADS, OWN),
    "llama_tied": ("llama", {"tie_word_embeddings": True}, HEADS, OWN),
    "llama_tying": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "llama_biases": (
        "llama",
        {"attention_bias": True},
        {"target_modules": ["q_proj", "o_proj"], "lora_bias": True},
        {"target_modules": ["q_proj"], "bias": "lora_only"},
    ),
    "llama_dora": (
        "llama",
        {"attention_bias": True},
        ALL | {"use_dora": True},
        {"target_modules": ["embed_tokens", "q_proj", "lm_head"], "use_dora": True},
    ),
    "qwen2": ("qwen2", {}, ALL, SOME | {"bias": "all"}),
    "qwen3": (
        "qwen3",
        {},
        ALL | {"rank_pattern": {r"layers\.0\..*q_proj": 7}, "alpha_pattern": {"down_proj": 3}},
        {"target_modules": r".*\.(q|up)_proj", "exclude_modules": r".*\.0\..*q_proj"},
    ),
    "gemma2": ("gemma2", {}, ALL, HEADS),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 6},
        HEADS | {"use_dora": True},
        OWN | {"ensure_weight_tying": True},
    ),
    "phi3": ("phi3", {}, ALL, {"target_modules": ["qkv_proj"], "layers_to_transform": [1]}),
    "mixtral": (
        "mixtral",
        {},
        {"target_modules": _ATTENTION},
        SOME | {"target_modules": ["v_proj"]},
    ),
    "qwen3_moe": ("qwen3_moe", {}, ALL, EXPERTS),
    "mixtral_experts": ("mixtral", {}, ALL, EXPERTS | {"target_modules": ["v_proj"]}),
    "olmoe": ("olmoe", {}, ALL, GATES),
    "deepseek_v3": ("deepseek_v3", {}, ALL, EXPERTS),
    "gpt_oss": ("gpt_oss", {}, ALL, EXPERTS | {"target_parameters": _OF_GPT_OSS}),
    "gpt_neox": ("gpt_neox", {}, ALL, {"target_modules": ["query_key_value", "embed_in"]}),
    "gpt2": (
        "gpt2",
        {},
        ALL | {"use_dora": True},
        {"target_modules": ["c_attn"], "bias": "lora_only"},
    ),
    "olmo2": ("olmo2", {}, ALL, {"target_modules": _MLP}),
    "llava": ("llava", {}, {"target_modules": _OF_TEXT}, {"target_modules": ["q_proj"]}),
    "qwen2_vl": ("qwen2_vl", {}, {"target_modules": _OF_TEXT}, {"target_modules": ["lm_head"]}),
    "granite": ("granite", {}, ALL, HEADS),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_peft_when_rows_have_two_adapters_and_none(
    tmp_path: Path, case: str
) -> None:
    architecture, overrides, first, second = CASES[case]
    loaded = load_tiny_model(architecture, tmp_path / "model", **overrides)
    oracles: dict[str, Any] = {}
    adapters = {}
    for seed, (name, options) in enumerate((("a@1", first), ("b@2", second))):
        folder = tmp_path / name
        oracles[name] = make_adapter(tmp_path / "model", folder, seed=seed, **options)
        adapters[name] = read_adapter(name, files_of(folder), loaded, max_rank=16)
    served = Served(loaded, adapters)
    names = ("a@1", "", "b@2", "a@1")

    logits = served.last_logits(TEXTS, names)

    assert takes_adapters(served.model)
    (plain,) = served.last_logits(TEXTS[1:2], [""])
    for tokens, name, actual in zip(TEXTS, names, logits, strict=True):
        if not name:
            assert difference(plain, actual) < TOLERANCE
            continue
        expected = logits_of(oracles[name], tokens)[-2:, : loaded.vocab_size]
        assert difference(expected, actual) < TOLERANCE, name
        if tokens == TEXTS[1]:
            assert difference(plain, actual) > CHANGE


def test_rows_without_adapter_keep_their_bits_when_others_have_one(tmp_path: Path) -> None:
    loaded = load_tiny_model("llama", tmp_path / "model", dtype="bfloat16")
    make_adapter(tmp_path / "model", tmp_path / "a", **ALL)
    adapter = read_adapter("a@1", files_of(tmp_path / "a"), loaded, max_rank=16)
    served = Served(loaded, {"a@1": adapter})

    adapted = served.last_logits(TEXTS[:3], ["a@1", "", "a@1"])
    plain = served.last_logits(TEXTS[:3], ["", "", ""])

    assert torch.equal(adapted[1], plain[1])
    assert not torch.equal(adapted[0], plain[0])


def test_packed_layers_take_adapters(tmp_path: Path, native_library: NativeLibrary) -> None:
    loaded = load_tiny_model("qwen2", tmp_path / "model")
    oracle = make_adapter(tmp_path / "model", tmp_path / "a", use_dora=True, **ALL)
    packed = pack_linears(loaded, native_library)
    adapter = read_adapter("a@1", files_of(tmp_path / "a"), packed, max_rank=16)

    (logits,) = Served(packed, {"a@1": adapter}).last_logits(TEXTS[:1], ["a@1"])

    assert difference(logits_of(oracle, TEXTS[0])[-2:], logits) < TOLERANCE


def test_quantised_layers_take_adapters_when_these_need_norms(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path / "plain")
    model = plain_model(tmp_path / "plain")
    round_matrices(model, "Q8_0")
    model.save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model.gguf", model, "llama", {}, type_name="Q8_0")
    oracle = make_adapter(tmp_path / "model", tmp_path / "a", use_dora=True, **ALL)
    loaded = load_model(
        ModelConfig(str(tmp_path / "model.gguf"), dtype="float32", keeps_packed=True)
    )
    assert quantized_linears(loaded.model)
    adapter = read_adapter("a@1", files_of(tmp_path / "a"), loaded, max_rank=16)

    (logits,) = Served(loaded, {"a@1": adapter}).last_logits(TEXTS[:1], ["a@1"])

    assert difference(logits_of(oracle, TEXTS[0])[-2:], logits) < TOLERANCE


# -- Bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "is_int8"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
def test_rows_have_the_same_bits_when_rows_with_other_adapters_share_the_pass(
    tmp_path: Path, native_library: NativeLibrary, dtype: str, *, is_int8: bool
) -> None:
    """Of packed layers."""
    loaded = load_tiny_model("qwen2", tmp_path / "model", dtype=dtype)
    packed = pack_linears(loaded, native_library, is_int8=is_int8)
    options = (ALL, SOME, HEADS, OWN, ALL | {"use_dora": True})
    adapters: dict[str, Adapter] = {}
    for index, each in enumerate(options):
        folder = tmp_path / str(index)
        make_adapter(tmp_path / "model", folder, seed=index, **each)
        adapters[str(index)] = read_adapter(str(index), files_of(folder), packed, max_rank=16)
    served = Served(packed, adapters, attending_with(NativeAttention(native_library)))
    names = [*adapters, ""]
    alone = [served.last_logits([TOKENS], [name])[0] for name in names]

    together = served.last_logits([TOKENS] * 12, names * 2)

    assert all(map(torch.equal, together, alone * 2))
    assert len({tuple(each.flatten().tolist()) for each in alone}) == len(names)
