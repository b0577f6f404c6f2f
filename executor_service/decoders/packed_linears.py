"""Matrices of a `transformers` model, packed for native kernels.

Packed matrices serve models that the native decoder does not run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from executor_service.decoders.cpu_decoder import log_dequantized
from executor_service.device import release_file_pages
from executor_service.model import (
    LoadedModel,
    QuantizedLinear,
    probe_attention,
    weights_bytes,
)
from executor_service.trials import can_be_packed, try_replacement
from splitserve_kernels.cpu import (
    GroupPart,
    NativeLibrary,
    WeightRows,
    linear,
    pack,
    pack_groups,
)
from splitserve_kernels.packed_weight import NotPackable

# Bytes of copies after which mapped pages of the originals are released.
_RELEASED_BYTES = 32 * 2**20


class PackedLinearModule(nn.Module):
    """Replacement of a linear layer, with packed copies of its weights."""

    def __init__(
        self,
        library: NativeLibrary,
        module: nn.Linear | QuantizedLinear,
        *,
        is_int8: bool,
        is_exact: bool = False,
    ) -> None:
        """Packs the weights of `module`.

        `is_int8`: weights are rounded, see `linear.pack`. `is_exact`: activations are not rounded
        where weights are codes. Raises NotPackable for quantised weights that kernels do not take.
        """
        super().__init__()
        self.in_features = module.in_features
        self.out_features = module.out_features
        self._library = library
        if isinstance(module, QuantizedLinear):
            outputs = np.arange(module.out_features, dtype=np.int32)
            self._packed = pack_groups(
                library,
                [GroupPart(module.stored, outputs)],
                module.out_features,
                module.bias,
                is_exact=is_exact or module.stored.dtype == torch.float32,
            )
        else:
            rows = WeightRows.of(module.weight)
            self._packed = pack(library, rows, module.bias, is_int8=is_int8)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self._packed.num_bytes

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies `rows` [..., in_features]. Returns [..., out_features]."""
        output = linear(self._library, self._packed, rows.reshape(-1, self.in_features))
        return output.view(*rows.shape[:-1], self.out_features)


def pack_linears(
    loaded: LoadedModel, library: NativeLibrary, *, is_int8: bool = False, is_exact: bool = False
) -> LoadedModel:
    """Replaces the matrices of `loaded.model` by packed ones, and returns the changed model.

    Modules other than linear layers (experts of a mixture, for example) stay. `is_exact`:
    activations are never rounded to 8 bits. Raises
    TrialFailed if the model then computes something else, or does not run any more; it is lost in
    that case.
    """
    model: Any = loaded.model
    packed: list[PackedLinearModule] = []
    dequantized: Counter[str] = Counter()

    def packed_of(module: nn.Linear | QuantizedLinear) -> PackedLinearModule:
        if isinstance(module, QuantizedLinear):
            try:
                return PackedLinearModule(library, module, is_int8=is_int8, is_exact=is_exact)
            except NotPackable as error:
                dequantized[str(error)] += 1
                module = module.dense(module.stored.dtype, loaded.device)
        return PackedLinearModule(library, module, is_int8=is_int8)

    def compute(tokens: Tensor) -> Tensor:
        num_bytes = 0
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if can_be_packed(module) or isinstance(module, QuantizedLinear):
                    packed.append(packed_of(module))
                    setattr(parent, name, packed[-1])
                    num_bytes += packed[-1].num_bytes
                    if num_bytes >= _RELEASED_BYTES:
                        release_file_pages()
                        num_bytes = 0
        return probe_attention(model, tokens)[0]

    try_replacement(loaded, compute, is_int8=is_int8)
    for reason, num_layers in dequantized.items():
        log_dequantized(loaded, reason, num_layers)
    num_bytes = sum(module.num_bytes for module in packed)
    return replace(loaded, weights_bytes=weights_bytes(model) + num_bytes)
