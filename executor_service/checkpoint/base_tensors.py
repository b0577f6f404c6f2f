"""Tensors of the base model for adapters, read from its checkpoint again when one needs them.

The loaded model may have been taken apart by then, or have its weights in another form.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from executor_service.adapters import is_transposed, short_name
from executor_service.checkpoint.folder import Checkpoint
from executor_service.checkpoint.quantised_layers import quantised_weights
from executor_service.device import release_file_pages
from executor_service.model import BaseTensor
from executor_service.quantization import LazyTensor, lazy_plain_weights


def base_tensors(checkpoint: Checkpoint, model: Any) -> BaseTensor:  # noqa: ANN401
    """Returns the reader of the tensors of `checkpoint`, from which `model` was loaded."""
    dtype: torch.dtype = model.dtype
    names = {module: name for name, module in model.named_modules()}
    transposed = {f"{name}.weight" for module, name in names.items() if is_transposed(module)}
    tied: dict[str, str] = {}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head in names:
        # Of two tied weights, files need only one.
        tied[f"{names[head]}.weight"] = f"{names[embedding]}.weight"

    @cache
    def stored() -> dict[str, LazyTensor]:
        if checkpoint.weight_format is not None or checkpoint.gguf is not None:
            weights = quantised_weights(checkpoint, dtype)
        else:
            weights = lazy_plain_weights(checkpoint.weight_files)
        return {short_name(name): weight for name, weight in weights.items()} | weights

    def read(name: str) -> Tensor | None:
        try:
            found = stored().get(name, stored().get(short_name(name)))
        except OSError:
            # The files have been removed since.
            return None
        if found is None:
            return read(tied[name]) if name in tied else None
        tensor = found[:].to(dtype, copy=True)
        release_file_pages()
        return tensor.T if name in transposed else tensor

    return read
