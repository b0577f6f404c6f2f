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
    LazyTensor,
    gguf_weights,
    lazy_weights,
    round_to_4_bits,
    round_to_8_bits,
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
) -> None:
    """Moves quantised weights of linear layers, experts and embedding from `weights` to `stored`.

    Placeholders of one number, expanded to the shape, remain.
    """
    with torch.device("meta"):
        skeleton = model_class(copy.deepcopy(config))
    head = skeleton.get_output_embeddings()
    embedding = skeleton.get_input_embeddings()
    names = {module: name for name, module in skeleton.named_modules()}
    pages = _ReadPages()
    for module, name in names.items():
        if type(module) is not nn.Linear and not (
            module is embedding and type(module) is nn.Embedding
        ):
            continue
        weight = weights.get(f"{name}.weight")
        packed = None if weight is None else weight.stored()
        if packed is not None:
            stored[name] = pages.released_after(packed)
            weights[f"{name}.weight"] = placeholder(packed.shape, packed.dtype)
    head_name, tied_name = names.get(head), names.get(embedding)
    if tied_name in stored and type(head) is nn.Linear and f"{head_name}.weight" not in weights:
        stored[str(head_name)] = stored[tied_name]
    for name, experts in take_experts(skeleton, weights, dtype).items():
        stored[name] = StoredExperts(
            *(
                tuple(tuple(map(pages.released_after, expert)) for expert in matrices)
                for matrices in (experts.gate_up, experts.down)
            )
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


def check_int4(checkpoint: Checkpoint, device: str) -> None:
    """Raises ModelUnsupported if the weights cannot be rounded to 4 bits when they are loaded."""
    if torch.device(device).type != "cpu":
        raise ModelUnsupported(f"quantization int4: not for {device}; allowed: CPUs")
    if checkpoint.weight_format is not None or checkpoint.gguf is not None:
        raise ModelUnsupported(
            f"quantization int4: {checkpoint.name} is quantised already; allowed: none, int8"
        )


def round_linears(model: Any) -> None:  # noqa: ANN401
    """Rounds linear layers to 4 bits, and the head to 8; a layer with other inputs is named."""
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
        rounded = (round_to_8_bits if module is head else round_to_4_bits)(
            module.weight, module.weight.dtype
        )
        model.set_submodule(name, QuantizedLinear(StoredWeight.of(rounded), module.bias))
        release_file_pages()
