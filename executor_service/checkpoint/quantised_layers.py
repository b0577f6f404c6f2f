"""Quantised linear layers in place of plain ones, while a model of `transformers` is loaded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from executor_service.checkpoint.folder import Checkpoint
from executor_service.checkpoint.quantised_experts import (
    StoredExperts,
    placeholder,
    set_experts,
    take_experts,
)
from executor_service.device import release_file_pages
from executor_service.errors import ModelUnsupported
from executor_service.model import QuantizedEmbedding, QuantizedLinear, show_progress
from executor_service.quantization import (
    GROUP_SIZE,
    ROUNDINGS,
    LazyTensor,
    Rounding,
    gguf_weights,
    lazy_weights,
)
from splitserve_kernels.packed_weight import PackedWeight, StoredWeight

_log = logging.getLogger(__name__)

# Bytes of codes after which mapped pages of weight files are released.
_RELEASED_BYTES = 64 * 2**20


def quantised_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Returns the tensors of a quantised checkpoint, which are dequantised when they are read."""
    if checkpoint.gguf is not None:
        return gguf_weights(checkpoint.gguf, dtype)
    assert checkpoint.weight_format is not None
    return lazy_weights(checkpoint.weight_files, checkpoint.weight_format, dtype)


def keep_packed(
    model_class: Any,  # noqa: ANN401
    config: Any,  # noqa: ANN401
    weights: dict[str, LazyTensor],
    dtype: torch.dtype,
    stored: dict[str, StoredWeight | StoredExperts],
    *,
    on_cpu: bool,
) -> dict[str, str]:
    """Moves quantised weights of linear layers from `weights` to `stored`.

    `on_cpu`: those of experts and of the embedding, too. Placeholders of one number, expanded to
    the shape, remain. Returns why other quantised weights are not moved, by name, except for
    embeddings, which no kernel multiplies with.
    """
    with torch.device("meta"):
        skeleton = model_class(copy.deepcopy(config))
    head = skeleton.get_output_embeddings()
    embedding = skeleton.get_input_embeddings()
    names = {module: name for name, module in skeleton.named_modules()}
    packed = {
        name: weight
        for module, name in names.items()
        if type(module) is nn.Linear or (module is embedding and type(module) is nn.Embedding)
        if f"{name}.weight" in weights
        if (weight := weights[f"{name}.weight"].stored()) is not None
    }
    head_name, tied_name = names.get(head), names.get(embedding)
    if tied_name in packed and type(head) is nn.Linear and f"{head_name}.weight" not in weights:
        packed[str(head_name)] = packed[tied_name]
    if not on_cpu:
        packed.pop(str(tied_name), None)
    pages = _ReadPages()
    counted = {id(weight): pages.released_after(weight) for weight in packed.values()}
    for name, weight in packed.items():
        stored[name] = counted[id(weight)]
        if f"{name}.weight" in weights:
            weights[f"{name}.weight"] = placeholder(weight.shape, weight.dtype)
    reasons: dict[str, str | None] = {}
    if on_cpu:
        experts, reasons = take_experts(skeleton, weights, dtype)
        for name, each in experts.items():
            stored[name] = StoredExperts(
                *(
                    tuple(tuple(map(pages.released_after, expert)) for expert in matrices)
                    for matrices in (each.gate_up, each.down)
                )
            )
    types = {name: type(module) for module, name in names.items()}
    for name, tensor in weights.items():
        if tensor.is_quantised:
            reasons.setdefault(name, _why_not_packed(types.get(name.rpartition(".")[0])))
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why_not_packed(module_type: type | None) -> str | None:
    """Returns why the weights of a module are dequantised; None if they never are packed."""
    if module_type is None:
        return "transformers renames, merges or converts them"
    if module_type is nn.Linear or issubclass(module_type, nn.Embedding):
        return None
    return f"{module_type.__name__} is no nn.Linear"


def warn_dequantised(
    weights: Mapping[str, LazyTensor],
    not_packed: Mapping[str, str],
    model: Any,  # noqa: ANN401
) -> None:
    """Logs at WARNING the loaded weights of `not_packed`, which has reasons by name."""
    names = sorted(name for name in not_packed if weights[name].was_read)
    if not names:
        return
    _log.warning(
        "quantised_layers_dequantised model=%s first=%s num_layers=%d reason=%r price=%r",
        type(model).__name__,
        names[0],
        len(names),
        "; ".join(dict.fromkeys(not_packed[name] for name in names)),
        f"they take the memory and time of {str(model.dtype).removeprefix('torch.')}",
    )


class _ReadPages:
    """Mapped pages of weight files, released each time that enough of them has been read."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def released_after(self, weight: StoredWeight) -> StoredWeight:
        """Returns `weight` so that its reads count."""

        def read(rows: slice) -> PackedWeight:
            packed = weight.read(rows)
            self._num_bytes += packed.num_bytes
            if self._num_bytes >= _RELEASED_BYTES:
                release_file_pages()
                self._num_bytes = 0
            return packed

        return replace(weight, read=read)


def set_quantised(model: Any, stored: Mapping[str, StoredWeight | StoredExperts]) -> None:  # noqa: ANN401
    """Puts layers with the weights `stored` in place of those with placeholders."""
    for name, weight in stored.items():
        if isinstance(weight, StoredExperts):
            set_experts(model, name, weight)
            continue
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            model.set_submodule(name, QuantizedEmbedding(weight))
        else:
            model.set_submodule(name, QuantizedLinear(weight, module.bias))


def check_rounding(name: str, checkpoint: Checkpoint) -> None:
    """Raises ModelUnsupported if the weights cannot be rounded to `name` when they are loaded."""
    if name not in ROUNDINGS:
        raise ModelUnsupported(f"quantization {name}: allowed: {', '.join(ROUNDINGS)}")
    if checkpoint.weight_format is not None or checkpoint.gguf is not None:
        raise ModelUnsupported(
            f"quantization {name}: {checkpoint.name} is quantised already; allowed: none, int8"
        )


def round_linears(model: Any, rounding: Rounding, device: torch.device) -> None:  # noqa: ANN401
    """Rounds linear layers on `device`; those with other inputs than kernels take are named."""
    head = model.get_output_embeddings()
    linears = [(name, each) for name, each in model.named_modules() if type(each) is nn.Linear]
    left = [name for name, module in linears if module.in_features % GROUP_SIZE]
    if left:
        _log.warning(
            "layers_not_rounded first=%s num_layers=%d reason=%r",
            left[0],
            len(left),
            f"inputs are no multiple of {GROUP_SIZE}",
        )
    for name, module in show_progress(linears, "layers rounded"):
        if module.in_features % GROUP_SIZE:
            continue
        rounded = (rounding.head if module is head else rounding.others)(
            module.weight.to(device), module.weight.dtype
        )
        model.set_submodule(name, QuantizedLinear(StoredWeight.of(rounded), module.bias))
        release_file_pages()
