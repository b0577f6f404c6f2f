"""Interfaces of models that return vectors.

Shape letters: R rows, L tokens of a row, S rows that sample, W width of the model, N numbers of a
vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from executor_service.steps import PoolingParams


class UncachedModel(Protocol):
    """Computes the vectors of whole texts, without KV pools."""

    def vectors(self, rows: Sequence[tuple[Tensor, PoolingParams]]) -> list[Tensor | str]:
        """Returns the vector [N] of each row, float32 on the CPU, in order.

        `rows`: token ids [L] int64 on the CPU, and the vector asked for. A row that fails has a
        text for people instead, which does not quote the input. Raises what no row explains (out of
        memory, a lost device).
        """
        ...


class VectorHead(Protocol):
    """Last steps from the pooled output of a model to vectors."""

    def finish(self, outputs: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
        """Returns the vector [N] of each of the S rows, float32, on the device of `outputs`.

        `outputs`: float32 [S, W], pooled hidden states, or the logits of a classifier.
        """
        ...
