"""Adapters of experts: names that these had before, packed experts, and refusals."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save, save_file
from torch import Tensor

from executor_service.adapters import read_adapter
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import pack_linears
from executor_service.model import LoadedModel, SeparateExperts
from splitserve_adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInvalid
from splitserve_kernels.cpu import NativeLibrary
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
from tests.unit.executor.quantization.test_gguf_model import EXPERTS

Tensors = dict[str, Tensor]

ALL: dict[str, Any] = {"r": 3, "lora_alpha": 8, "target_modules": "all-linear"}
# Former names: of the module around the experts, and of gate, up and down of one.
FORMER = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
MLP_WIDTHS = {"mixtral": 96, "qwen3_moe": 32}


def _write_former(folder: Path, architecture: str, **fields: object) -> None:
    """Writes an adapter of the router and of each expert, as PEFT once did."""
    module, gate, up, down = FORMER[architecture]
    inner = MLP_WIDTHS[architecture]
    sizes = {gate: (64, inner), up: (64, inner), down: (inner, 64)}
    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.{module}"
        layers = {f"{prefix}.gate": (64, 4)}
        for expert in range(4):
            layers |= {f"{prefix}.experts.{expert}.{name}": own for name, own in sizes.items()}
        for name, (num_inputs, num_outputs) in layers.items():
            down_weight = torch.randn(3, num_inputs, generator=generator)
            up_weight = torch.randn(num_outputs, 3, generator=generator)
            tensors[f"{name}.lora_A.weight"] = 0.1 * down_weight
            tensors[f"{name}.lora_B.weight"] = 0.1 * up_weight
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_NAME)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 3,
        "lora_alpha": 8,
        "target_modules": ["gate", gate, up, down],
    }
    (folder / CONFIG_NAME).write_text(json.dumps(config | fields))


@pytest.mark.parametrize("architecture", FORMER)
def test_logits_equal_those_of_peft_when_each_expert_has_names_of_its_own(
    tmp_path: Path, architecture: str
) -> None:
    from peft import PeftModel

    loaded = load_tiny_model(architecture, tmp_path / "model")
    _write_former(tmp_path / "a", architecture)
    with warnings.catch_warnings():
        # PEFT itself adds a rank_pattern, and warns of it.
        warnings.simplefilter("ignore")
        model = plain_model(tmp_path / "model")
        oracle: Any = PeftModel.from_pretrained(model, str(tmp_path / "a"))
    adapter = read_adapter("a@1", files_of(tmp_path / "a"), loaded, max_rank=16)

    (logits,) = Served(loaded, {"a@1": adapter}).last_logits([TOKENS], ["a@1"])

    assert len(adapter.experts) == 4
    assert difference(logits_of(oracle.eval(), TOKENS)[-2:], logits) < TOLERANCE


@pytest.mark.parametrize("is_packed", [False, True])
def test_separate_experts_take_adapters(
    tmp_path: Path, native_library: NativeLibrary, *, is_packed: bool
) -> None:
    make_tiny_model("qwen3_moe", tmp_path / "plain", overrides={"norm_topk_prob": True})
    model = plain_model(tmp_path / "plain")
    round_matrices(model, "Q8_0")
    model.save_pretrained(tmp_path / "model")
    oracle = make_adapter(tmp_path / "model", tmp_path / "a", **ALL)
    loaded = _of_gguf(tmp_path, model)
    if is_packed:
        loaded = pack_linears(loaded, native_library)
    adapter = read_adapter("a@1", files_of(tmp_path / "a"), loaded, max_rank=16)
    served = Served(loaded, {"a@1": adapter})

    logits = served.last_logits([TOKENS] * 2, ["a@1", ""])

    assert any(isinstance(each, SeparateExperts) for each in loaded.model.modules())
    assert difference(logits_of(oracle, TOKENS)[-2:], logits[0]) < TOLERANCE
    if is_packed:
        assert torch.equal(logits[1], served.last_logits([TOKENS] * 2, ["", ""])[1])


def _of_gguf(folder: Path, model: Any) -> LoadedModel:  # noqa: ANN401
    settings = {f"qwen3moe.{key}": value for key, value in EXPERTS.items()}
    write_gguf(folder / "model.gguf", model, "qwen3moe", settings, type_name="Q8_0")
    return load_model(ModelConfig(str(folder / "model.gguf"), dtype="float32", keeps_packed=True))


# -- Refusals --------------------------------------------------------------------------------------

_EXPERT = "base_model.model.model.layers.1.mlp.experts.2.up_proj"
_OUTER = "base_model.model.model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny_model("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def _refused(files: dict[str, bytes], loaded: LoadedModel, why: str) -> None:
    with pytest.raises(AdapterInvalid, match=why):
        read_adapter("a@1", files, loaded, max_rank=16)


def _without(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def _with(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def _with_router_biases(tensors: Tensors) -> None:
    for name in [each for each in tensors if "experts" in each]:
        del tensors[name]
    for layer in range(2):
        _with(f"base_model.model.model.layers.{layer}.mlp.gate.lora_B.bias", 4)(tensors)


@pytest.mark.parametrize(
    ("fields", "change", "why"),
    [
        (
            {},
            _without(f"{_EXPERT}.lora_A.weight", f"{_EXPERT}.lora_B.weight"),
            r"lacks the tensors of .*experts\.2\.up_proj, which target_modules",
        ),
        ({}, _without(f"{_EXPERT}.lora_A.weight"), "an expert has lora_A and lora_B"),
        ({}, _with(f"{_EXPERT}.lora_A.weight", 2, 64), "gives the rank 3"),
        ({}, _with(f"{_EXPERT}.lora_B.weight", 33, 3), r"needs \[32, 3\]"),
        ({}, _with(f"{_EXPERT.replace('.2.', '.4.')}.lora_A.weight", 3, 64), "has no layer"),
        ({"target_modules": ["gate", "up_proj"]}, lambda _: None, "do not name"),
        ({"use_dora": True}, lambda _: None, "has no lora_magnitude_vector"),
        (
            {"lora_bias": True},
            _with_router_biases,
            "lora_bias is not served for a router",
        ),
    ],
    ids=["lacking", "half", "rank", "outputs", "expert", "fields", "dora", "bias"],
)
def test_adapter_of_single_experts_is_refused_when_its_files_do_not_fit(
    tmp_path: Path,
    loaded: LoadedModel,
    fields: dict[str, object],
    change: Callable[[Tensors], None],
    why: str,
) -> None:
    _write_former(tmp_path / "a", "qwen3_moe", **fields)
    files = files_of(tmp_path / "a")
    tensors = load(files[WEIGHTS_NAME])
    change(tensors)
    _refused(files | {WEIGHTS_NAME: save(tensors)}, loaded, why)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_without(f"{_OUTER}.lora_A.weight", f"{_OUTER}.lora_B.weight"), "target_parameters of"),
        (_with(f"{_OUTER}.lora_B.weight", 64, 13), r"needs \[64, 12\]"),
        (_with(f"{_OUTER}.base_layer.base_layer.lora_A.weight", 12, 64), "has no layer"),
        (_with(f"{_OUTER}.base_layer.lora_A.weight", 25, 64), "gives the rank 6"),
    ],
    ids=["lacking", "outputs", "depth", "rank"],
)
def test_adapter_of_joined_experts_is_refused_when_its_tensors_do_not_fit(
    tmp_path: Path, loaded: LoadedModel, change: Callable[[Tensors], None], why: str
) -> None:
    make_tiny_model("qwen3_moe", tmp_path / "model")
    make_adapter(tmp_path / "model", tmp_path / "a", **ALL)
    files = files_of(tmp_path / "a")
    tensors = load(files[WEIGHTS_NAME])
    change(tensors)
    _refused(files | {WEIGHTS_NAME: save(tensors)}, loaded, why)


def test_adapter_is_refused_when_two_tensors_change_the_same_experts(
    tmp_path: Path, loaded: LoadedModel
) -> None:
    make_tiny_model("qwen3_moe", tmp_path / "model")
    make_adapter(tmp_path / "model", tmp_path / "a", **ALL)
    files = files_of(tmp_path / "a")
    tensors = load(files[WEIGHTS_NAME])
    _with(f"{_OUTER}.0.down_proj.lora_A.weight", 3, 32)(tensors)
    _with(f"{_OUTER}.0.down_proj.lora_B.weight", 64, 3)(tensors)
    config = json.loads(files[CONFIG_NAME])
    config["target_modules"] += ["experts.0.down_proj"]
    changed = {CONFIG_NAME: json.dumps(config).encode(), WEIGHTS_NAME: save(tensors)}
    _refused(changed, loaded, "another tensor change the same outputs")


def test_adapter_of_single_experts_is_refused_when_gate_and_up_are_interleaved(
    tmp_path: Path,
) -> None:
    _write_former(tmp_path / "a", "qwen3_moe")
    files = files_of(tmp_path / "a")
    tensors = load(files[WEIGHTS_NAME])
    of_experts = {name: each for name, each in tensors.items() if "experts" in name}
    oss = load_tiny_model("gpt_oss", tmp_path / "model")
    _refused(files | {WEIGHTS_NAME: save(of_experts)}, oss, "has no layer")
