"""Reading of adapters that PEFT saved, and refusal of what is not served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from executor_service.adapters import read_adapter
from executor_service.model import Adapter, LoadedModel
from splitserve_adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInvalid
from tests.support.models.peft_adapters import files_of, make_adapter
from tests.support.models.tiny_models import load_tiny_model

Tensors = dict[str, Tensor]
_LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
_HEAD = "base_model.model.lm_head.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_tiny_model("llama", folder / "model")


@pytest.fixture(scope="module")
def files(loaded: LoadedModel, folder: Path) -> dict[str, bytes]:
    """Those of an adapter of rank 4 for two kinds of layers."""
    assert loaded.adapter_targets
    make_adapter(folder / "model", folder / "a", r=4, target_modules=["q_proj", "down_proj"])
    return files_of(folder / "a")


def changed(
    files: dict[str, bytes], fields: dict[str, Any], change: Callable[[Tensors], object]
) -> dict[str, bytes]:
    """Returns the files with other fields of the configuration, and changed tensors."""
    tensors = load(files[WEIGHTS_NAME])
    change(tensors)
    config = json.loads(files[CONFIG_NAME]) | fields
    return {CONFIG_NAME: json.dumps(config).encode(), WEIGHTS_NAME: save(tensors)}


def nothing(_: Tensors) -> None:
    """Changes no tensor."""


def read(files: dict[str, bytes], loaded: LoadedModel) -> Adapter:
    """Reads an adapter of at most rank 8."""
    return read_adapter("a@1", files, loaded, max_rank=8)


def renamed(rename: Callable[[str], str]) -> Callable[[Tensors], None]:
    """Returns a change that gives all tensors other names."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        renamed(lambda name: name.removeprefix("base_model.model.")),
        renamed(lambda name: name.replace(".weight", ".default.weight")),
        renamed(lambda name: name.replace("model.layers", "model.language_model.layers")),
    ],
    ids=["usual", "no_prefix", "default", "multimodal"],
)
def test_adapter_is_the_same_when_its_tensors_have_other_names(
    files: dict[str, bytes], loaded: LoadedModel, change: Callable[[Tensors], None]
) -> None:
    adapter = read(changed(files, {}, change), loaded)
    assert len(adapter.updates) == 4
    assert adapter.num_bytes == 4 * sum(map(Tensor.numel, load(files[WEIGHTS_NAME]).values()))
    down = adapter.updates["model.layers.0.self_attn.q_proj"].down
    assert torch.equal(down, load(files[WEIGHTS_NAME])[f"{_LAYER}.lora_A.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adapter_has_the_dtype_of_the_model_when_its_file_has_another(
    files: dict[str, bytes], loaded: LoadedModel, dtype: torch.dtype
) -> None:
    def round_all(tensors: Tensors) -> None:
        tensors.update({name: each.to(dtype) for name, each in tensors.items()})

    adapter = read(changed(files, {}, round_all), loaded)
    assert all(update.up.dtype == torch.float32 for update in adapter.updates.values())


def test_settings_of_no_effect_are_ignored(files: dict[str, bytes], loaded: LoadedModel) -> None:
    fields = {
        "lora_dropout": 0.1,
        "base_model_name_or_path": "somewhere/else",
        "init_lora_weights": "eva",
        "fan_in_fan_out": True,
        "inference_mode": False,
        "a_future_field": None,
    }
    assert read(changed(files, fields, nothing), loaded).updates


_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "other_method": ({"peft_type": "IA3"}, "peft_type is 'IA3'; allowed: LORA"),
    "other_task": ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    "rank_0": ({"r": 0}, "r is 0; allowed: an integer from 1 to 8"),
    "rank_huge": ({"r": 10**9}, "r is 1000000000"),
    "rank_pattern": ({"rank_pattern": {"q_proj": 9}}, "'q_proj'"),
    "rank_expression": ({"rank_pattern": {"(": 4}}, "a regular expression"),
    "alpha": ({"lora_alpha": "16"}, "lora_alpha is '16'"),
    "alpha_nan": ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    "bias": ({"bias": "some"}, "bias is 'some'; allowed: none, all, lora_only"),
    "no_targets": ({"target_modules": None}, "target_modules is None"),
    "expression": ({"target_modules": ".*("}, "a regular expression"),
    "endless": (
        {"target_modules": r"(?:(\w|\w\w|\.)+)+\d(?<=x)"},
        "an expression that matches sooner",
    ),
    "replication": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "parameters": ({"target_parameters": "down_proj"}, "names of parameters"),
    "lacking_parameter": ({"target_parameters": ["o_proj.weight"]}, "target_parameters of"),
    "token_indices": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "alora": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "qalora": ({"use_qalora": True}, "use_qalora is True"),
    "unknown": ({"a_future_field": 3}, "a_future_field is 3"),
    "changed_base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    "saved": ({"modules_to_save": ["norm"]}, "modules_to_save has 'norm'; allowed: embed_tokens"),
    "lacking_saved": ({"modules_to_save": ["lm_head"]}, "lacks the weights of lm_head"),
    "lacking": ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "v_proj"),
    "unexplained": ({"target_modules": ["down_proj"]}, "q_proj.lora_A.weight: target_modules"),
    "excluded": ({"exclude_modules": ["q_proj"]}, "q_proj.lora_A.weight: target_modules"),
    "one_layer": ({"layers_to_transform": [1]}, "layers.0."),
    "other_rank": ({"r": 5}, "gives the rank 5"),
    "dora": ({"use_dora": True}, "no lora_magnitude_vector though use_dora is true"),
    "lora_bias": ({"lora_bias": True}, "no bias of lora_B"),
}


@pytest.mark.parametrize("case", _CONFIGS)
def test_adapter_is_refused_by_field_when_the_configuration_is_not_served(
    files: dict[str, bytes], loaded: LoadedModel, case: str
) -> None:
    fields, words = _CONFIGS[case]
    with pytest.raises(AdapterInvalid) as caught:
        read(changed(files, fields, nothing), loaded)
    assert words in str(caught.value)
    assert "adapter_" in str(caught.value)


def _with(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


_TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "nan": (lambda t: t[f"{_LAYER}.lora_A.weight"].fill_(torch.nan), "not finite"),
    "inf": (lambda t: t[f"{_LAYER}.lora_B.weight"][0].fill_(torch.inf), "not finite"),
    "half": (lambda t: t.pop(f"{_LAYER}.lora_B.weight"), "has no partner"),
    "inputs": (
        _with(f"{_LAYER}.lora_A.weight", torch.ones(4, 32)),
        "has shape [4, 32] where model.layers.0.self_attn.q_proj of the model needs [4, 64]",
    ),
    "outputs": (_with(f"{_LAYER}.lora_B.weight", torch.ones(4, 4)), "needs [64, 4]"),
    "vector": (_with(f"{_LAYER}.lora_A.weight", torch.ones(4)), "has shape [4]"),
    "empty": (_with(f"{_LAYER}.lora_A.weight", torch.ones(0, 64)), "has shape [0, 64]"),
    "int": (_with(f"{_LAYER}.lora_A.weight", torch.ones(4, 64).int()), "has dtype int32"),
    "magnitude": (_with(f"{_LAYER}.lora_magnitude_vector", torch.ones(64)), "use_dora is false"),
    "bias": (_with(f"{_LAYER}.bias", torch.ones(64)), "bias is 'none'"),
    "other": (_with("base_model.model.prompt_embeddings", torch.ones(2)), "no tensor of a LoRA"),
    "norm": (_with("base_model.model.model.norm.weight", torch.ones(64)), "replaces weights"),
    "rows": (_with(_HEAD, torch.ones(161, 64)), "has shape [161, 64]"),
    "layer": (
        lambda t: t.update({k.replace("layers.0", "layers.7"): v.clone() for k, v in t.items()}),
        "the model has no layer",
    ),
    "none": (dict.clear, "has no tensors"),
}


@pytest.mark.parametrize("case", _TENSORS)
def test_adapter_is_refused_by_tensor_when_the_model_has_no_place_for_it(
    files: dict[str, bytes], loaded: LoadedModel, case: str
) -> None:
    change, words = _TENSORS[case]
    with pytest.raises(AdapterInvalid) as caught:
        read(changed(files, {}, change), loaded)
    assert words in str(caught.value)
    assert WEIGHTS_NAME in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 40, -5])
def test_adapter_is_refused_when_its_file_is_cut(
    files: dict[str, bytes], loaded: LoadedModel, size: int
) -> None:
    cut = {**files, WEIGHTS_NAME: files[WEIGHTS_NAME][:size]}
    with pytest.raises(AdapterInvalid, match="truncated or corrupt"):
        read(cut, loaded)


def test_adapter_is_refused_when_a_file_is_missing(
    files: dict[str, bytes], loaded: LoadedModel
) -> None:
    with pytest.raises(AdapterInvalid, match=r"adapter_config.json is missing"):
        read({WEIGHTS_NAME: files[WEIGHTS_NAME]}, loaded)


def test_weights_replace_those_of_the_model_when_they_differ(
    files: dict[str, bytes], loaded: LoadedModel
) -> None:
    """PEFT saves the model's own weights beside a changed embedding, and loads what it finds."""
    base = loaded.base_tensor("lm_head.weight")
    assert base is not None
    assert read(changed(files, {}, _with(_HEAD, base)), loaded).own_head is None
    own = read(changed(files, {}, _with(_HEAD, base + 1)), loaded).own_head
    assert own is not None
    assert torch.equal(own, base + 1)


def test_error_is_short_when_a_name_is_long(files: dict[str, bytes], loaded: LoadedModel) -> None:
    name = f"base_model.model.{'x' * 10_000}.lora_A.weight"
    with pytest.raises(AdapterInvalid) as caught:
        read(changed(files, {}, _with(name, torch.ones(4, 64))), loaded)
    assert len(str(caught.value)) < 1100
