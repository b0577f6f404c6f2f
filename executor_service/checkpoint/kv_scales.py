"""Calibrated scales of keys and values in a checkpoint, for pools in 8 bits.

A stored number times the scale is the key, or the value. Compression tools write one scale for the
keys and one for the values of a layer, under names that changed over the years.
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

_log = logging.getLogger(__name__)

_LAYER_OF_SCALE = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_KEY, _VALUE, _BOTH = "k_scale", "v_scale", "kv_scale"
# Kinds of scales by the end of a tensor's name: exports of vLLM, of other tools, and old names.
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
# Scales of queries and attention weights in other engines; our results do not depend on them.
_OF_QUERIES = re.compile(r"(^|\.)self_attn\.(attn\.)?(q|prob)_scale$")


def is_kv_scale(name: str) -> bool:
    """Returns whether a tensor is only needed for rounding keys, values or queries."""
    return _what(name) is not None or _OF_QUERIES.search(name) is not None


def read_kv_scales(
    files: Sequence[Path], model: nn.Module, attention_modules: Sequence[nn.Module]
) -> tuple[KVScales, ...]:
    """Returns the scales of each of `attention_modules`, in order.

    Empty if the checkpoint has none. `files`: weight files. One line in the log says which it is.
    Raises ModelUnsupported if only some layers have scales, or if a scale is not a single positive
    number.
    """
    found = _read(files)
    if not found:
        _log.warning(
            "kv_scales_missing: 8-bit keys and values are stored unscaled; values beyond 448 are"
            " clipped"
        )
        return ()
    scales = tuple(
        KVScales(_one(found, number, _KEY), _one(found, number, _VALUE))
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
    """Reads the scales, by layer number and kind."""
    from safetensors import safe_open

    found: dict[tuple[int, str], float] = {}
    for path in files:
        if path.suffix != ".safetensors":
            continue
        opened: Any = safe_open(path, framework="pt")
        with opened as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                what, layer = _what(name), _LAYER_OF_SCALE.search(name)
                if what is None or layer is None:
                    continue
                number = _number(path, name, file.get_tensor(name))
                for each in (_KEY, _VALUE) if what == _BOTH else (what,):
                    found[int(layer[1]), each] = number
    return found


def _number(path: Path, name: str, tensor: Any) -> float:  # noqa: ANN401
    if tensor.numel() != 1:
        raise ModelUnsupported(
            f"{path}: {name} has shape {list(tensor.shape)}: allowed: one number per layer"
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
    """Returns the layer number of each module, from its name."""
    names = {module: name for name, module in model.named_modules()}
    layers = [_LAYER_OF_SCALE.search(names[module]) for module in attention_modules]
    return [int(layer[1]) if layer is not None else -1 for layer in layers]
