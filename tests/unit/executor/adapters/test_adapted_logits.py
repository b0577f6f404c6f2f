"""Adapters in models that `transformers` runs: logits are those of PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.adapters import read_adapter
from executor_service.device import KVCache
from executor_service.model import (
    Adapter,
    LoadedModel,
    PagedModel,
    build_input_batch,
    takes_adapters,
    torch_model,
)
from tests.support.models.peft_adapters import files_of, logits_of, make_adapter
from tests.support.models.tiny_models import load_tiny_model
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE, NUM_BLOCKS = 4, 16
# Of float32 logits, relative to the largest.
TOLERANCE = 1e-5
TOKENS = ([5, 17, 42, 9, 71, 23], [5, 17, 42, 9, 71, 23], [88, 3, 14, 15, 92, 65], [7, 17, 42])

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
ALL = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
SOME = {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}
HEADS = {"r": 2, "target_modules": ["embed_tokens", "v_proj", "lm_head"]}
OWN = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}

# Architecture, overrides of its configuration, and two adapters.
CASES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, ALL, SOME),
    "llama_heads": ("llama", {}, HEADS, OWN),
    "llama_tied": ("llama", {"tie_word_embeddings": True}, HEADS, OWN),
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
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6}, HEADS | {"use_dora": True}, OWN),
    "phi3": ("phi3", {}, ALL, {"target_modules": ["qkv_proj"], "layers_to_transform": [1]}),
    "mixtral": (
        "mixtral",
        {},
        {"target_modules": _ATTENTION},
        SOME | {"target_modules": ["v_proj"]},
    ),
    "gpt_neox": ("gpt_neox", {}, ALL, {"target_modules": ["query_key_value", "embed_in"]}),
    "gpt2": (
        "gpt2",
        {},
        ALL | {"use_dora": True},
        {"target_modules": ["c_attn"], "bias": "lora_only"},
    ),
    "olmo2": ("olmo2", {}, ALL, {"target_modules": _MLP}),
    "granite": ("granite", {}, ALL, HEADS),
}


class Served:
    """A loaded model with adapters."""

    def __init__(self, loaded: LoadedModel, adapters: Mapping[str, Adapter]) -> None:
        self.loaded = loaded
        self.adapters = adapters
        cache = KVCache(loaded.layers, BLOCK_SIZE, NUM_BLOCKS, 0, loaded.dtype, loaded.device)
        self.model: PagedModel = torch_model(loaded, cache)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Returns the logits of the last token of each row, [R, V]."""
        cpu = torch.device("cpu")
        step, indexes = make_step(rows), list(range(len(rows)))
        batch = build_input_batch(step, indexes, BLOCK_SIZE, cpu, adapters=self.adapters)
        with torch.inference_mode():
            return self.model.logits(batch).clone()


def row_of(index: int, tokens: Sequence[int], computed: int, adapter: str) -> Row:
    """Returns a row on blocks of its own."""
    return Row(tokens, computed, [3 * index, 3 * index + 1, 3 * index + 2], 3, adapter=adapter)


def difference(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest difference, relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


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
    names = ["a@1", "", "b@2", "a@1"]
    prompts = [
        row_of(i, t[:-1], 0, name) for i, (t, name) in enumerate(zip(TOKENS, names, strict=True))
    ]
    decodes = [
        row_of(i, t[-1:], len(t) - 1, name)
        for i, (t, name) in enumerate(zip(TOKENS, names, strict=True))
    ]
    steps = [served.logits(prompts), served.logits(decodes)]
    base = Served(loaded, {})
    plain = [
        base.logits([row_of(1, TOKENS[1][:-1], 0, "")]),
        base.logits([row_of(1, TOKENS[1][-1:], 5, "")]),
    ]
    for index, (tokens, name) in enumerate(zip(TOKENS, names, strict=True)):
        if name:
            expected = logits_of(oracles[name], tokens)[-2:, : loaded.vocab_size]
            actual = torch.stack([step[index] for step in steps])
        else:
            expected, actual = torch.cat(plain), torch.stack([step[index] for step in steps])
        assert difference(expected, actual) < TOLERANCE, name
        if name:
            assert difference(torch.cat(plain)[:1], actual[:1]) > 0.01
    assert takes_adapters(served.model)
