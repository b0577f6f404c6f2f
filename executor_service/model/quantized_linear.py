"""Layers of quantised checkpoints, whose weights stay in their files until they are packed.

Shape letters: N outputs, K inputs, V vocabulary, W width of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitserve_kernels.gpu.launch import FLOAT8_MAX
from splitserve_kernels.packed_weight import PackedWeight, StoredWeight

# Inputs that native kernels round with one scale, and the largest integer.
_GROUP_SIZE, _NUM_STEPS = 32, 127


class QuantizedLayer(nn.Module, ABC):
    """Layer whose weights stay in their file; they are read and dequantised at each use."""

    def __init__(self, stored: StoredWeight) -> None:
        super().__init__()
        self._stored = [stored]  # in a list: copies of the module share it

    @property
    def stored(self) -> StoredWeight:
        """The weights."""
        return self._stored[0]

    def release(self) -> None:
        """Forgets the weights; the layer cannot run any more."""
        self._stored.clear()

    @abstractmethod
    def dense(
        self, dtype: torch.dtype, device: torch.device, num_first: int | None = None
    ) -> nn.Module:
        """Returns the layer with plain weights in `dtype` on `device`.

        `num_first`: only the first outputs, or rows of an embedding; None for all.
        """


class QuantizedLinear(QuantizedLayer):
    """Replacement of an `nn.Linear` that reads and dequantises its weights at each use.

    Native kernels replace it; it is their reference. `stored`: weights [N, K].
    """

    def __init__(self, stored: StoredWeight, bias: nn.Parameter | None) -> None:
        super().__init__(stored)
        self.out_features, self.in_features = stored.shape
        self.bias = bias
        self.rounds_rows = False

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies `rows` [..., K]. Returns [..., N]."""
        parts = [
            functional.linear(
                _rounded(rows, part) if self.rounds_rows else rows,
                part.on(rows.device).dequantized(rows.dtype),
            )
            for _, part in self.stored.parts()
        ]
        output = torch.cat(parts, dim=-1)
        return output if self.bias is None else output + self.bias

    def dense(
        self, dtype: torch.dtype, device: torch.device, num_first: int | None = None
    ) -> nn.Linear:
        """Returns a plain linear layer, see `QuantizedLayer`."""
        weight = self.stored.dequantized(dtype, num_first, device)
        bias = None if self.bias is None else self.bias.detach()[:num_first].to(device, dtype)
        return plain_linear(weight, bias)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Returns a linear layer with `weight` [N, K] and `bias` [N], which are not copied."""
    with torch.device("meta"):
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain


def _rounded(rows: Tensor, weight: PackedWeight) -> Tensor:
    """Rounds `rows` as the kernels of their device do for `weight`."""
    if rows.device.type != "cpu":
        return rounded_to_float8(rows) if weight.has_float8_inputs else rows
    if rows.shape[-1] % _GROUP_SIZE:
        return rows
    groups = rows.float().reshape(*rows.shape[:-1], -1, _GROUP_SIZE)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    factors = torch.where(largest > 0, _NUM_STEPS / largest, 0.0)
    rounded: Tensor = torch.round(groups * factors) * (largest / _NUM_STEPS)
    return rounded.flatten(-2).to(rows.dtype)


def rounded_to_float8(rows: Tensor) -> Tensor:
    """Rounds each of `rows` to 8-bit floats, with a scale of its own."""
    numbers = rows.float()
    largest = numbers.abs().amax(dim=-1, keepdim=True)
    scales = torch.where(largest > 0, largest / FLOAT8_MAX, 1.0)
    return ((numbers / scales).to(torch.float8_e4m3fn).float() * scales).to(rows.dtype)


class QuantizedEmbedding(QuantizedLayer):
    """Replacement of an `nn.Embedding` that reads and dequantises the rows that are looked up.

    `stored`: weights [V, W].
    """

    def __init__(self, stored: StoredWeight) -> None:
        super().__init__(stored)
        self.num_embeddings, self.embedding_dim = stored.shape

    def forward(self, token_ids: Tensor) -> Tensor:
        """Looks up `token_ids` [...] int64. Returns [..., W]."""
        unique, places = torch.unique(token_ids, return_inverse=True)
        source = self.stored.in_memory()
        rows = [source.read(slice(each, each + 1)).dequantized() for each in unique.tolist()]
        return torch.cat(rows)[places]

    def dense(
        self, dtype: torch.dtype, device: torch.device, num_first: int | None = None
    ) -> nn.Embedding:
        """Returns a plain embedding, see `QuantizedLayer`."""
        weight = self.stored.dequantized(dtype, num_first, device)
        with torch.device("meta"):
            plain = nn.Embedding(*weight.shape)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        return plain


def quantized_layers(model: nn.Module) -> list[QuantizedLayer]:
    """Returns the layers of `model` with quantised weights."""
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]


def quantized_linears(model: nn.Module) -> list[QuantizedLinear]:
    """Returns the linear layers of `model` with quantised weights."""
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


@contextmanager
def rounded_inputs(model: nn.Module) -> Iterator[None]:
    """Inside, quantised layers round what they multiply, as kernels do."""
    layers = quantized_linears(model)
    for layer in layers:
        layer.rounds_rows = True
    try:
        yield
    finally:
        for layer in layers:
            layer.rounds_rows = False


def dequantize_layers(model: Any) -> int:  # noqa: ANN401
    """Gives the quantised layers of `model` plain weights; returns how many there were."""
    num_replaced = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, QuantizedLayer):
                setattr(parent, name, module.dense(module.stored.dtype, model.device))
                num_replaced += 1
    return num_replaced
