"""Adapters as llama.cpp has them: a GGUF file with two matrices for each changed weight.

Source: convert_lora_to_gguf.py and llama-adapter.cpp of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from executor_service.adapters.assembly import Assembly, ModuleTensors, NamedTensor, Places
from executor_service.adapters.peft_format import finished
from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.model import Adapter, LoadedModel
from executor_service.quantization import (
    GgufFile,
    GgufLayer,
    GgufTensor,
    gguf_layer,
    order_of_pairs,
    parse_gguf,
)
from splitserve_adapters import AdapterInvalid

_ENDINGS = (".weight.lora_a", ".weight.lora_b")


def read_gguf_adapter(
    name: str, file_name: str, content: bytes, loaded: LoadedModel, max_rank: int
) -> Adapter:
    """Returns the adapter in a GGUF file for `loaded`. Raises AdapterInvalid."""
    try:
        return _read(name, parse_gguf(file_name, content), loaded, max_rank)
    except (ModelUnreadable, ModelUnsupported) as error:
        text = str(error)
        raise AdapterInvalid(text if file_name in text else f"{file_name}: {text}") from error


def _read(name: str, file: GgufFile, loaded: LoadedModel, max_rank: int) -> Adapter:
    alpha = _checked_alpha(file)
    pairs: dict[str, dict[str, GgufTensor]] = {}
    for tensor in file.tensors.values():
        stem, ending = _split(tensor, file)
        pairs.setdefault(stem, {})[ending] = tensor
    places = Places(loaded)
    modules = {}
    for stem, pair in pairs.items():
        if len(pair) != len(_ENDINGS):
            raise _invalid(file, stem, "one matrix", "two, lora_a and lora_b")
        layer = _layer(stem, file, loaded)
        found = () if layer is None else places.of(layer.name)
        if layer is None or not found:
            raise _invalid(file, stem, "no layer of the model that can be changed", "others")
        module = _module(file, pair, layer, loaded, is_embedding=found[0].target.is_embedding)
        modules[layer.name] = _scaled(file, module, alpha, max_rank)
    return finished(name, loaded, Assembly(loaded, places).updates(modules), {}, {})


def _checked_alpha(file: GgufFile) -> float:
    """Returns the numerator of the factor; 0 for a factor of 1."""
    for key, allowed in (("general.type", "adapter"), ("adapter.type", "lora")):
        if file.metadata.get(key) != allowed:
            raise _invalid(file, key, file.metadata.get(key), allowed)
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise _invalid(file, "adapter.alora.invocation_tokens", "there", "no such key")
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _invalid(file, "adapter.lora.alpha", alpha, "a number")
    return float(alpha)


def _split(tensor: GgufTensor, file: GgufFile) -> tuple[str, str]:
    """Splits the name of a tensor: the weight that it changes, and its part ("lora_a")."""
    if tensor.is_quantised:
        raise _invalid(file, tensor.name, tensor.type_name, "F32, F16, BF16")
    for ending in _ENDINGS:
        if tensor.name.endswith(ending):
            return tensor.name.removesuffix(ending), ending
    raise _invalid(file, tensor.name, "a tensor", f"names that end in {' or '.join(_ENDINGS)}")


def _layer(stem: str, file: GgufFile, loaded: LoadedModel) -> GgufLayer | None:
    architecture = str(file.metadata.get("general.architecture"))
    return gguf_layer(architecture, _text_config(loaded).model_type, stem)


def _module(
    file: GgufFile,
    pair: Mapping[str, GgufTensor],
    layer: GgufLayer,
    loaded: LoadedModel,
    *,
    is_embedding: bool,
) -> ModuleTensors:
    down, up = (
        NamedTensor(f"{file.paths[0]}: {pair[ending].name}", pair[ending].plain())
        for ending in _ENDINGS
    )
    if down.data.ndim != 2 or up.data.ndim != 2:
        raise _invalid(file, layer.name, "matrices of another number of dimensions", "2")
    if is_embedding:
        # llama.cpp looks its rows up.
        down = NamedTensor(down.name, down.data.T)
    config = _text_config(loaded)
    num_heads = config.num_attention_heads if layer.are_queries_permuted else 0
    if layer.are_keys_permuted:
        num_heads = config.num_key_value_heads
    num_rows = len(up.data)
    if num_heads and num_rows % (2 * num_heads) == 0:
        up = NamedTensor(up.name, up.data[order_of_pairs(num_rows, num_heads)])
    return ModuleTensors(down, up)


def _scaled(file: GgufFile, module: ModuleTensors, alpha: float, max_rank: int) -> ModuleTensors:
    assert module.down is not None, "it has both matrices"
    rank = len(module.down.data)
    if rank > max_rank:
        raise _invalid(file, f"the rank of {module.down.name}", rank, f"1 to {max_rank}")
    return replace(module, scale=alpha / rank if alpha else 1.0)


def _text_config(loaded: LoadedModel) -> Any:  # noqa: ANN401
    config: Any = loaded.model.config
    return config.get_text_config(decoder=True)


def _invalid(file: GgufFile, what: str, value: object, allowed: str) -> AdapterInvalid:
    return AdapterInvalid(f"{file.paths[0]}: {what} is {value!r}; allowed: {allowed}")
