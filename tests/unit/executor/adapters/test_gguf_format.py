"""Reading of llama.cpp's adapters: logits are those of a model with the sum of both weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.adapters import read_adapter
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.model import LoadedModel
from splitserve_adapters import AdapterInvalid
from tests.support.models.gguf_writer import Setting, write_gguf, write_gguf_adapter
from tests.support.models.peft_adapters import logits_of
from tests.support.models.tiny_models import make_tiny_model
from tests.unit.executor.adapters.adapted_rows import (
    TOKENS,
    TOLERANCE,
    Served,
    difference,
    plain_model,
)

RANK, ALPHA = 4, 8.0
SETTINGS: Mapping[str, Setting] = {
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": ALPHA,
}
_LLAMA = ["model.embed_tokens", "lm_head"] + [
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")
]
_PHI3 = ["model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"]


def random_matrices(model: Any, names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:  # noqa: ANN401
    """Returns lora_A and lora_B of modules, as PEFT has them."""
    generator = torch.Generator().manual_seed(5)
    matrices = {}
    for name in names:
        outputs, inputs = model.get_submodule(name).weight.shape
        if name.endswith("embed_tokens"):
            outputs, inputs = inputs, outputs
        down = torch.randn(RANK, inputs, generator=generator) / 8
        matrices[name] = down, torch.randn(outputs, RANK, generator=generator) / 8
    return matrices


def merged(model: Any, matrices: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> Any:  # noqa: ANN401
    """Adds the products of the matrices to the weights of `model`, and returns it."""
    for name, (down, up) in matrices.items():
        product = scale * up @ down
        weight = model.get_submodule(name).weight.data
        weight += product.T if name.endswith("embed_tokens") else product
    return model


@dataclass(frozen=True, slots=True)
class Case:
    """A loaded model, and one of `transformers` with the adapter in its weights."""

    loaded: LoadedModel
    oracle: Any
    file: bytes


def made(
    folder: Path,
    architecture: str,
    names: list[str],
    settings: Mapping[str, Setting] = SETTINGS,
    scale: float = ALPHA / RANK,
    *,
    is_base_gguf: bool = False,
) -> Case:
    """Writes a model and an adapter in `folder`."""
    make_tiny_model(architecture, folder / "model")
    model = plain_model(folder / "model")
    base = folder / "model"
    if is_base_gguf:
        base = folder / "model.gguf"
        write_gguf(base, model, architecture, {})
    matrices = random_matrices(model, names)
    path = folder / "adapter.gguf"
    write_gguf_adapter(path, architecture, model.config, matrices, settings)
    loaded = load_model(ModelConfig(str(base), dtype="float32"))
    return Case(loaded, merged(model, matrices, scale), path.read_bytes())


def served_difference(case: Case) -> float:
    """Returns the difference between the served logits and those of the oracle."""
    adapter = read_adapter("a@1", {"adapter.gguf": case.file}, case.loaded, max_rank=8)
    (logits,) = Served(case.loaded, {"a@1": adapter}).last_logits([TOKENS], ["a@1"])
    return difference(logits_of(case.oracle, TOKENS)[-2:], logits)


@pytest.mark.parametrize(
    ("architecture", "names", "is_base_gguf"),
    [
        ("llama", _LLAMA, False),
        ("llama", _LLAMA, True),
        ("qwen2", _LLAMA, False),
        ("gemma2", _LLAMA[:1] + _LLAMA[2:], False),
        ("phi3", _PHI3, False),
    ],
    ids=["llama", "llama_gguf", "qwen2", "gemma2", "phi3"],
)
def test_logits_equal_those_of_merged_weights(
    tmp_path: Path, architecture: str, names: list[str], is_base_gguf: bool
) -> None:
    case = made(tmp_path, architecture, names, is_base_gguf=is_base_gguf)
    assert served_difference(case) < TOLERANCE


def test_factor_is_1_when_alpha_is_0(tmp_path: Path) -> None:
    settings = {**SETTINGS, "adapter.lora.alpha": 0.0}
    assert served_difference(made(tmp_path, "qwen2", _LLAMA, settings, 1.0)) < TOLERANCE


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(tmp_path_factory.mktemp("llama"), "llama", _LLAMA)


@pytest.mark.parametrize(
    ("architecture", "settings", "matrices", "words"),
    [
        ("llama", {"general.type": "model"}, {}, "general.type is 'model'; allowed: adapter"),
        ("llama", {"adapter.type": "control"}, {}, "adapter.type is 'control'; allowed: lora"),
        ("llama", {"adapter.lora.alpha": float("inf")}, {}, "adapter.lora.alpha is inf"),
        ("llama", {"adapter.alora.invocation_tokens": [1]}, {}, "adapter.alora"),
        ("qwen2", {}, {}, "general.architecture is qwen2 where the model is a llama"),
        ("llama", {}, {"model.layers.5.mlp.up_proj": (4, 64, 96)}, "no layer of the model"),
        ("llama", {}, {"model.layers.0.mlp.up_proj": (4, 64, 95)}, "needs [96, 4]"),
        ("llama", {}, {"model.layers.0.self_attn.q_proj": (4, 64, 48)}, "needs [64, 4]"),
        ("llama", {}, {"model.layers.0.mlp.up_proj": (9, 64, 96)}, "is 9; allowed: 1 to 8"),
        ("llama", {}, {"model.norm": (1, 64, 64)}, "no layer of the model"),
    ],
    ids=range(10),
)
def test_adapter_is_refused_by_key_when_it_is_not_served(
    tmp_path: Path,
    llama: Case,
    architecture: str,
    settings: Mapping[str, Setting],
    matrices: Mapping[str, tuple[int, int, int]],
    words: str,
) -> None:
    path = tmp_path / "adapter.gguf"
    tensors = {
        name: (torch.ones(rank, inputs), torch.ones(outputs, rank))
        for name, (rank, inputs, outputs) in matrices.items()
    }
    tensors = tensors or {"model.layers.0.mlp.up_proj": (torch.ones(4, 64), torch.ones(96, 4))}
    config = llama.loaded.model.config
    write_gguf_adapter(path, architecture, config, tensors, {**SETTINGS, **settings})
    with pytest.raises(AdapterInvalid) as caught:
        read_adapter("a@1", {"adapter.gguf": path.read_bytes()}, llama.loaded, max_rank=8)
    assert words in str(caught.value)
    assert "adapter.gguf" in str(caught.value)


@pytest.mark.parametrize("size", [0, 3, 60, 400, -1])
def test_adapter_is_refused_when_its_file_is_cut(llama: Case, size: int) -> None:
    with pytest.raises(AdapterInvalid, match=r"adapter\.gguf"):
        read_adapter("a@1", {"adapter.gguf": llama.file[:size]}, llama.loaded, max_rank=8)
