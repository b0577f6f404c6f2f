"""Sizes and matrices of a decoder of the Llama family, independent of its implementation.

Shape letters: D head size, W width of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes that all layers share.

    The rotary embedding rotates the first `rotary_dim` of D numbers of a head, in pairs (i, i +
    rotary_dim / 2). `scale` multiplies attention scores.
    """

    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    epsilon: float
    scale: float


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Weights of a linear layer. `weight`: [outputs, inputs]. `bias`: [outputs] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. Norms: [W]; `query_norm`, `key_norm`: [D] or None."""

    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    attention_output: LinearWeights
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    input_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    sliding_window: int | None = None
