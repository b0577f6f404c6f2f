"""Low-rank updates of the matrices of a decoder (LoRA).

Shape letters: I inputs of a matrix, O outputs, r rank, V vocabulary, W width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """Low-rank change of a linear layer: it adds `scale` * up (down x) + `bias` to the outputs.

    `down`: [r, I], `up`: [O, r], both contiguous and in the model's dtype. `bias`: [O] float32,
    None for none: what is added to the layer's own bias. `gain`: [O] float32, None for all 1
    (DoRA): the product of weights and inputs, without bias, and the low-rank part are multiplied by
    it. `r` is up to three times the adapter's rank where the adapter has three layers and the model
    one, and 1 (of zeros) where only the bias changes.
    """

    down: Tensor
    up: Tensor
    scale: float
    bias: Tensor | None = None
    gain: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerUpdates:
    """Updates of the matrices of one layer; None: the matrix has no update."""

    query: LowRankUpdate | None = None
    key: LowRankUpdate | None = None
    value: LowRankUpdate | None = None
    attention_output: LowRankUpdate | None = None
    gate: LowRankUpdate | None = None
    up: LowRankUpdate | None = None
    down: LowRankUpdate | None = None


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter of a decoder. `layers`: one for each layer.

    `embedding`: of the embedding; `down` is [r, V], and a column is looked up. `own_embedding`,
    `own_head`: [V, W], instead of the decoder's, None for none.
    """

    layers: Sequence[LayerUpdates]
    head: LowRankUpdate | None = None
    embedding: LowRankUpdate | None = None
    own_embedding: Tensor | None = None
    own_head: Tensor | None = None
