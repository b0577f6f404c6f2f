"""Matrices of a `transformers` model, packed for native kernels.

Packed matrices serve models that the native decoder does not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from executor_service.decoders.cpu_decoder import log_dequantized
from executor_service.device import release_file_pages, release_freed_memory
from executor_service.model import (
    LoadedModel,
    QuantizedEmbedding,
    QuantizedLinear,
    probe_attention,
    weights_bytes,
)
from executor_service.steps import Int32Array
from executor_service.trials import can_be_packed, try_replacement, try_vectors
from splitserve_kernels.cpu import (
    GroupPart,
    NativeAdapter,
    NativeLibrary,
    PackedLinear,
    StepAdapters,
    WeightRows,
    linear,
    linear_adapted,
    pack,
    pack_groups,
    pack_update,
    unpack_outputs,
)
from splitserve_kernels.low_rank_update import LowRankUpdate
from splitserve_kernels.packed_weight import NotPackable, StoredWeight

# Bytes of copies after which mapped pages of the originals are released.
_RELEASED_BYTES = 32 * 2**20
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An adapter of one layer. `own`: weights instead of the layer's, None for these."""

    update: NativeAdapter
    own: PackedLinear | None


class PackedLinearModule(nn.Module):
    """Replacement of a linear layer, with packed copies of its weights. An AdaptingLinear."""

    # T5 converts its inputs to the dtype of a weight here, if there is one.
    weight: Tensor | None = None

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
    def weights(self) -> PackedLinear:
        """The packed weights."""
        return self._packed

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies `rows` [..., in_features]. Returns [..., out_features]."""
        output = linear(self._library, self._packed, rows.reshape(-1, self.in_features))
        return output.view(*rows.shape[:-1], self.out_features)

    def prepare(self, update: LowRankUpdate | None, own: Tensor | None) -> _Prepared:
        """Packs the update and weights of an adapter, see AdaptingLinear."""
        library, packed = self._library, self._packed
        outputs = np.arange(self.out_features)
        change = pack_update(library, [update], [outputs], self.in_features, packed.dtype)
        replaced = None
        if own is not None:
            bias = None if packed.bias is None else packed.bias[: self.out_features]
            replaced = pack(library, WeightRows.of(own.to(packed.dtype)), bias)
        return _Prepared(NativeAdapter(library, [change], None, None, None), replaced)

    def adapted(self, rows: Tensor, prepared: Sequence[Any], of_row: Int32Array) -> Tensor:
        """Multiplies `rows` with adapters, see AdaptingLinear."""
        rows, shape = rows.reshape(-1, self.in_features), (*rows.shape[:-1], self.out_features)
        library, updates = self._library, [each.update for each in prepared]
        output = linear_adapted(library, self._packed, rows, StepAdapters(updates, of_row))
        for index, each in enumerate(prepared):
            own = np.flatnonzero(of_row == index)
            if each.own is not None and len(own):
                alone = StepAdapters([each.update], np.zeros(len(own), np.int32))
                output[own] = linear_adapted(library, each.own, rows[own], alone)
        return output.view(shape)


class PackedEmbeddingModule(nn.Module):
    """Replacement of an embedding, with the codes of its weights."""

    def __init__(self, library: NativeLibrary, packed: PackedLinear) -> None:
        """`packed`: groups, with an output for each token; may be those of a tied head."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = packed.num_outputs, packed.num_inputs
        self._library = library
        self._packed = packed

    def forward(self, token_ids: Tensor) -> Tensor:
        """Looks up `token_ids` [...] int64. Returns [..., embedding_dim]."""
        rows = unpack_outputs(self._library, self._packed, token_ids.reshape(-1))
        return rows.view(*token_ids.shape, -1)


class _Packing:
    """Replaces matrices by packed ones. `num_bytes`: of these. `dequantized`: layers by reason."""

    def __init__(self, library: NativeLibrary, *, is_int8: bool, is_exact: bool) -> None:
        self.num_bytes = 0
        self.dequantized: Counter[str] = Counter()
        self._library = library
        self._is_int8 = is_int8
        self._is_exact = is_exact
        self._num_released = 0
        self._of_tied: list[tuple[StoredWeight, PackedLinear]] = []

    def replace_in(self, model: nn.Module) -> None:
        """Replaces linear layers, then embeddings, which share the codes of a tied head."""
        parents = list(model.modules())
        for parent in parents:
            for name, module in list(parent.named_children()):
                if can_be_packed(module) or isinstance(module, QuantizedLinear):
                    setattr(parent, name, self._linear(module))
        for parent in parents:
            for name, module in list(parent.named_children()):
                if isinstance(module, QuantizedEmbedding):
                    setattr(parent, name, self._embedding(module))

    def _linear(self, module: Any) -> PackedLinearModule:  # noqa: ANN401
        settings = {"is_int8": self._is_int8, "is_exact": self._is_exact}
        try:
            packed = PackedLinearModule(self._library, module, **settings)
        except NotPackable as error:
            assert isinstance(module, QuantizedLinear)
            self.dequantized[str(error)] += 1
            packed = PackedLinearModule(
                self._library, module.dense(module.stored.dtype, _CPU), **settings
            )
        else:
            if isinstance(module, QuantizedLinear) and module.bias is None:
                self._of_tied.append((module.stored, packed.weights))
        self._count(packed.weights)
        return packed

    def _embedding(self, module: QuantizedEmbedding) -> nn.Module:
        for stored, packed in self._of_tied:
            if stored is module.stored:
                return PackedEmbeddingModule(self._library, packed)
        outputs = np.arange(module.num_embeddings, dtype=np.int32)
        groups = [GroupPart(module.stored, outputs)]
        try:
            packed = pack_groups(self._library, groups, module.num_embeddings)
        except NotPackable as error:
            self.dequantized[str(error)] += 1
            return module.dense(module.stored.dtype, _CPU)
        self._count(packed)
        return PackedEmbeddingModule(self._library, packed)

    def _count(self, packed: PackedLinear) -> None:
        self.num_bytes += packed.num_bytes
        if self.num_bytes - self._num_released >= _RELEASED_BYTES:
            release_file_pages()
            release_freed_memory()
            self._num_released = self.num_bytes


def pack_linears(
    loaded: LoadedModel, library: NativeLibrary, *, is_int8: bool = False, is_exact: bool = False
) -> LoadedModel:
    """Replaces the matrices of `loaded.model` by packed ones, and returns the changed model.

    Plain parameters outside linear layers (experts of a mixture, for example) stay. `is_exact`:
    activations are never rounded to 8 bits. Raises TrialFailed if the model then computes something
    else, or does not run any more; it is lost in that case.
    """
    packing = _Packing(library, is_int8=is_int8, is_exact=is_exact)

    def compute(tokens: Tensor) -> Tensor:
        packing.replace_in(loaded.model)
        return probe_attention(loaded.model, tokens)[0]

    if _is_uncached(loaded):
        try_vectors(loaded, lambda: packing.replace_in(loaded.model), is_int8=is_int8)
    else:
        try_replacement(loaded, compute, is_int8=is_int8)
    for reason, num_layers in packing.dequantized.items():
        log_dequantized(loaded, reason, num_layers)
    return replace(loaded, weights_bytes=weights_bytes(loaded.model) + packing.num_bytes)


def _is_uncached(loaded: LoadedModel) -> bool:
    return loaded.vectors is not None and loaded.vectors.is_uncached
