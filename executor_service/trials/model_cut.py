"""The first layers of a model in float32, one of every kind: cheap to try, and without noise.

In 16 bits a model's own rounding hides what is wrong with it by as much. In float32 the same layers
with the same weights show it, and copying a few of them takes little memory and time.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.device.memory import available_host_bytes
from executor_service.model.transformers_attention import context_of, unbind

# A cut knows these tokens only: the rows of large vocabularies take more than a few layers.
CUT_VOCAB_SIZE = 1024
# A model that takes no more than this in float32 is not cut at all.
_SMALL_BYTES = 64 * 2**20
# The layers of a cut take no more than this, nor than this part of the memory there is.
_LARGEST_BYTES = 4 * 2**30
_LARGEST_RATIO = 0.25
_LAYER_NUMBER = re.compile(r"idx|index|layer_?(id|num)")


def cut_to_float32(model: Any, attention_modules: Iterable[nn.Module]) -> Any | None:  # noqa: ANN401
    """A copy of `model` that shares nothing but, where it is float32 already, the numbers.

    `attention_modules`: those that attend, in their order. None if there is no room for a layer of
    every kind.
    """
    room = min(_LARGEST_BYTES, int(_LARGEST_RATIO * _available_bytes(model.device)))
    layers = _layers(model, list(attention_modules))
    if not layers:
        return _copy(model, []) if _bytes(model) <= room else None
    sizes = list(itertools.accumulate(_bytes(layer) for layer in layers))
    num_layers = len(layers) if sizes[-1] <= _SMALL_BYTES else _num_first_kinds(model, layers)
    if sizes[num_layers - 1] > room:
        return None
    cut = _copy(model, layers[num_layers:])
    if num_layers < len(layers):
        _shorten(cut, len(layers), num_layers)
    return cut


def _layers(model: nn.Module, attention_modules: list[nn.Module]) -> list[nn.Module]:
    """The list of layers with one attending module in each; empty if the model has no such list."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attention_modules):
            pairs = zip(module, attention_modules, strict=True)
            if all(attention in set(layer.modules()) for layer, attention in pairs):
                return list(module)
    return []


def _num_first_kinds(model: Any, layers: list[nn.Module]) -> int:  # noqa: ANN401
    """How many layers from the first on have one of every kind among them."""
    settings = vars(model.config.get_text_config(decoder=True))
    lists = [s for s in settings.values() if isinstance(s, (list, tuple)) and len(s) == len(layers)]
    kinds: list[object] = []
    last_new = -1
    for index, layer in enumerate(layers):
        kind = (list(_facts(layer)), [each[index] for each in lists])
        if kind not in kinds:
            kinds.append(kind)
            last_new = index
    return last_new + 1


def _facts(layer: nn.Module) -> Iterator[object]:
    """What tells the kind of a layer: its modules, their settings and the shapes of its weights."""
    for name, module in layer.named_modules():
        yield name, type(module)
        for attribute, setting in vars(module).items():
            is_setting = setting is None or isinstance(setting, (bool, int, float, str))
            if is_setting and not _LAYER_NUMBER.search(attribute):
                yield attribute, setting
    for name, parameter in layer.named_parameters():
        yield name, parameter.shape


def _copy(model: Any, dropped: list[nn.Module]) -> Any:  # noqa: ANN401
    copied = copy.deepcopy(model, _replaced(model, dropped))
    unbind(copied.modules())
    return copied


def _replaced(model: Any, dropped: list[nn.Module]) -> dict[int, Any]:  # noqa: ANN401
    """What `copy.deepcopy` is to take instead of parameters and layers, by their ids."""
    memo: dict[int, Any] = {id(layer): nn.Identity() for layer in dropped}
    gone = {module for layer in dropped for module in layer.modules()}
    by_token = {id(tensor) for tensor in _tensors_by_token(model)}
    for module in model.modules():
        if module in gone:
            continue
        context = context_of(module)
        if context is not None:  # it may be large, and is not the copy's
            memo[id(context)] = nn.Identity()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            numbers = tensor.detach()
            if id(tensor) in by_token:
                numbers = numbers[:CUT_VOCAB_SIZE]
            if numbers.is_floating_point():
                numbers = numbers.float()
            if isinstance(tensor, nn.Parameter):
                numbers = nn.Parameter(numbers, requires_grad=False)
            memo[id(tensor)] = numbers
    return memo


def _tensors_by_token(model: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Those with one row, or number, for each token of the vocabulary."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for name in ("weight", "bias"):
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor):
                yield tensor


def _shorten(cut: Any, num_before: int, num_layers: int) -> None:  # noqa: ANN401
    for module in cut.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_before:
            del module[num_layers:]
    cut.config.get_text_config(decoder=True).num_hidden_layers = num_layers


def _bytes(module: nn.Module) -> int:
    """In float32."""
    return sum(4 * parameter.numel() for parameter in module.parameters())


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()
