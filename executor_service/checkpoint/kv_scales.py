"""Scales of keys and values that a checkpoint was calibrated with, for pools in 8 bits.

A stored number times the scale is the key, or the value. What compresses models writes one scale
for the keys and one for the values of a layer, under the names of several years.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from executor_service.errors import ModelUnsupported
from splitserve_kernels.paged_batch import KVScales

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_KEY, _VALUE, _BOTH = "k_scale", "v_scale", "kv_scale"
# The end of a tensor's name, and what it is; of vLLM's exports, of others', and what was once.
_ENDINGS = {
    "self_attn.k_scale": _KEY,
    "self_attn.v_scale": _VALUE,
    "self_attn.attn.k_scale": _KEY,
    "self_attn.attn.v_scale": _VALUE,
    "self_attn.k_proj.k_scale": _KEY,
    "self_attn.v_proj.v_scale": _VALUE,
    "self_attn.k_proj.output_scale": _KEY,
    "self_attn.v_proj.output_scale": _VALUE,
    "self_attn.kv_scale": _BOTH,
}
# How other engines round queries and weights of keys: no number of ours depends on it.
_OF_QUERIES = re.compile(r"(^|\.)self_attn\.(attn\.)?(q|prob)_scale$")

_log = logging.getLogger(__name__)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is one that only rounding keys, values, queries needs."""
    return _what(name) is not None or _OF_QUERIES.search(name) is not None


def read_kv_scales(
    files: Sequence[Path], model: nn.Module, attention_modules: Sequence[nn.Module]
) -> tuple[KVScales, ...]:
    """Of each of `attention_modules`, in their order; none if the checkpoint has no scales.

    `files`: those of the weights. Which it is, is one line in the log. Raises ModelUnsupported if
    there are scales for some layers only, or others than one positive number.
    """
    found = _read(files)
    if not found:
        _log.warning(
            "kv_scales_missing: keys and values in 8 bits are stored as they are; what is beyond"
            " 448 is cut off"
        )
        return ()
    scales = tuple(
        KVScales(*(_one(found, number, what) for what in (_KEY, _VALUE)))
        for number in _layer_numbers(model, attention_modules)
    )
    keys, values = ([each.key for each in scales], [each.value for each in scales])
    _log.info(
        "kv_scales_read num_layers=%d keys=%.3g..%.3g values=%.3g..%.3g",
        len(scales),
        min(keys),
        max(keys),
        min(values),
        max(values),
    )
    return scales


def _what(name: str) -> str | None:
    return next((what for end, what in _ENDINGS.items() if f".{name}".endswith(f".{end}")), None)


def _read(files: Sequence[Path]) -> dict[tuple[int, str], float]:
    """By the number of the layer and what it is."""
    from safetensors import safe_open

    found: dict[tuple[int, str], float] = {}
    for path in files:
        if path.suffix != ".safetensors":
            continue
        opened: Any = safe_open(path, framework="pt")
        with opened as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                what, layer = _what(name), _LAYER.search(name)
                if what is None or layer is None:
                    continue
                number = _number(path, name, file.get_tensor(name))
                for each in (_KEY, _VALUE) if what == _BOTH else (what,):
                    found[int(layer[1]), each] = number
    return found


def _number(path: Path, name: str, tensor: Any) -> float:  # noqa: ANN401
    if tensor.numel() != 1:
        raise ModelUnsupported(
            f"{path}: {name} has shape {list(tensor.shape)}: allowed: one number for a layer"
        )
    number = float(tensor)
    if not (math.isfinite(number) and number > 0):
        raise ModelUnsupported(f"{path}: {name} is {number}: allowed: a positive number")
    return number


def _one(found: Mapping[tuple[int, str], float], layer: int, what: str) -> float:
    try:
        return found[layer, what]
    except KeyError as error:
        raise ModelUnsupported(
            f"the checkpoint has scales for keys and values, but no {what} of layer {layer}:"
            " allowed: both for each layer, or none at all"
        ) from error


def _layer_numbers(model: nn.Module, attention_modules: Sequence[nn.Module]) -> list[int]:
    """The number of the layer that each module is in, by its name."""
    names = {module: name for name, module in model.named_modules()}
    layers = [_LAYER.search(names[module]) for module in attention_modules]
    return [int(layer[1]) if layer is not None else -1 for layer in layers]
