"""Inputs of native decoders: sizes and matrices of a model, and limits of the rows of a run.

Shape letters: D head size, W width of the model, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.packed_weight import StoredWeight


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
    """Weights of a linear layer. `weight`: [outputs, inputs]. `bias`: [outputs] or None.

    `stored`: quantised weights; `weight` is empty then.
    """

    weight: Tensor
    bias: Tensor | None = None
    stored: StoredWeight | None = None

    @property
    def num_outputs(self) -> int:
        """Outputs of the layer."""
        return len(self.weight) if self.stored is None else self.stored.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the layer computes."""
        return self.weight.dtype if self.stored is None else self.stored.dtype

    def is_same_as(self, other: LinearWeights) -> bool:
        """Returns whether both layers share their weights, as tied ones do; biases may differ."""
        if self.stored is not None or other.stored is not None:
            return self.stored is other.stored
        is_at_same_place = self.weight.data_ptr() == other.weight.data_ptr()
        return is_at_same_place and self.weight.shape == other.weight.shape

    def dequantized(self, device: torch.device | None = None) -> LinearWeights:
        """Returns the layer with plain weights, on `device`; None for the CPU."""
        if self.stored is None:
            return self
        return LinearWeights(self.stored.dequantized(device=device), self.bias)


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


# Called after each token of a run that is not its last, with the tokens so far, [R, n] int32,
# padded with -1 for rows that have ended. The run ends if it returns False. It is called in any
# thread, one call at a time; it raises nothing, and keeps no view of the tokens.
AfterToken = Callable[[npt.NDArray[np.int32]], bool]


@dataclass(frozen=True, slots=True)
class RunRows:
    """Rows that generate several tokens, each of which is the next input of its row.

    `draws`: R sampling parameters; `draws.positions` are those of the first tokens, and each
    further token is one position later. `num_tokens`: [R] int32, most tokens of each row, 1 or
    more. `stop_offsets`: [R + 1] int32, start of the stop tokens of each row in `stop_token_ids`
    int32. `after_token`: see AfterToken; a model that gives all tokens in one go ignores it.
    """

    draws: DrawRows
    num_tokens: npt.NDArray[np.int32]
    stop_offsets: npt.NDArray[np.int32]
    stop_token_ids: npt.NDArray[np.int32]
    after_token: AfterToken | None = None

    @classmethod
    def of(
        cls,
        draws: DrawRows,
        num_tokens: npt.NDArray[np.int32],
        stop_token_ids: Sequence[Collection[int]],
        after_token: AfterToken | None = None,
    ) -> RunRows:
        """Builds the columns. `stop_token_ids`: R collections."""
        offsets = np.zeros(len(stop_token_ids) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in stop_token_ids], out=offsets[1:])
        stops = np.fromiter((t for tokens in stop_token_ids for t in tokens), np.int32, offsets[-1])
        return cls(draws, np.ascontiguousarray(num_tokens, np.int32), offsets, stops, after_token)

    def __len__(self) -> int:
        """Returns R, the number of rows."""
        return len(self.num_tokens)

    @property
    def max_num_tokens(self) -> int:
        """Largest `num_tokens` of all rows."""
        return int(self.num_tokens.max())
