"""Models that return vectors: their interfaces, pooling of hidden states, and last steps.

Shape letters: R rows, L tokens of a row, S rows that return vectors, W width of the model, M
pooling modes, N numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

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

    def to(self, device: torch.device) -> VectorHead:
        """Returns the head with its weights on `device`."""
        ...


@dataclass(frozen=True, slots=True)
class VectorParts:
    """Parts of a loaded model that returns vectors.

    `head`: last steps behind the model. `output_size`: numbers per token that the model computes in
    place of logits. `uncached`: computes rows whole, `head` included; None for a model that
    computes the outputs of a row's last token through paged attention. `description`: of how
    `uncached` computes, for people.
    """

    head: VectorHead
    output_size: int
    uncached: UncachedModel | None = None
    description: str = ""


# -- Pooling ---------------------------------------------------------------------------------------


class PoolingMode(Enum):
    """Way to make one vector of a row's hidden states; names as in sentence-transformers' files."""

    CLS = "cls"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST_TOKEN = "lasttoken"


def pool(states: Tensor, modes: Sequence[PoolingMode]) -> Tensor:
    """Returns float32 [R, M * W]: rows of L tokens each, [R, L, W], pooled in each mode."""
    pooled = [_POOLED[mode](states) for mode in modes]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)


def _weighted_mean(states: Tensor) -> Tensor:
    """Returns the mean in which the weight of a token is its position, from 1 on."""
    length = states.shape[1]
    weights = torch.arange(1, length + 1, device=states.device, dtype=torch.float32)
    weighted = states.float() * weights[:, None]
    return weighted.sum(dim=1) / weights.sum()


_POOLED: dict[PoolingMode, Callable[[Tensor], Tensor]] = {
    PoolingMode.CLS: lambda states: states[:, 0].float(),
    PoolingMode.MAX: lambda states: states.amax(dim=1).float(),
    PoolingMode.MEAN: lambda states: states.mean(dim=1, dtype=torch.float32),
    PoolingMode.MEAN_SQRT_LEN: lambda states: (
        states.sum(dim=1, dtype=torch.float32) / states.shape[1] ** 0.5
    ),
    PoolingMode.WEIGHTED_MEAN: _weighted_mean,
    PoolingMode.LAST_TOKEN: lambda states: states[:, -1].float(),
}


# -- Last steps ------------------------------------------------------------------------------------


class DenseStep(nn.Module):
    """Linear layer with an activation function, and perhaps a residual connection."""

    def __init__(
        self,
        linear: nn.Linear,
        activation: nn.Module,
        residual: nn.Module | None = None,
    ) -> None:
        """`residual`: maps the inputs that are added to the outputs; None to add nothing."""
        super().__init__()
        self.linear = linear
        self.activation = activation
        self.residual = residual

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns [S, outputs] for `inputs` [S, W]."""
        outputs: Tensor = self.activation(self.linear(inputs))
        return outputs if self.residual is None else outputs + self.residual(inputs)


class NormalizeStep(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns [S, W] for `inputs` [S, W]."""
        return functional.normalize(inputs, dim=-1)


@dataclass(frozen=True, slots=True)
class EmbeddingHead:
    """VectorHead of embeddings: `steps`, then the cut, then normalisation if `is_normalised`."""

    steps: nn.Sequential
    is_normalised: bool

    def finish(self, outputs: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
        for step in self.steps:
            outputs = step(outputs)
        # Rows mostly ask for the same.
        kinds = {(each.num_dimensions, each.raw) for each in params}
        finished = {kind: self._finish(outputs, *kind) for kind in kinds}
        return [finished[each.num_dimensions, each.raw][row] for row, each in enumerate(params)]

    def _finish(self, outputs: Tensor, num_dimensions: int, raw: bool) -> Tensor:
        cut = outputs[:, :num_dimensions] if num_dimensions else outputs
        if raw or not self.is_normalised:
            return cut
        return functional.normalize(cut, dim=-1)

    def to(self, device: torch.device) -> EmbeddingHead:
        return EmbeddingHead(self.steps.to(device), self.is_normalised)


class Activation(Enum):
    """Function from a classifier's logits to scores."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """VectorHead of a classifier.

    `score`: makes logits of hidden states; None if the outputs are logits.
    """

    activation: Activation
    score: nn.Module | None = None

    def finish(self, outputs: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
        logits = outputs if self.score is None else self.score(outputs)
        scores = logits
        if self.activation is Activation.SIGMOID:
            scores = torch.sigmoid(logits)
        elif self.activation is Activation.SOFTMAX:
            scores = torch.softmax(logits, dim=-1)
        return [(logits if each.raw else scores)[row] for row, each in enumerate(params)]

    def to(self, device: torch.device) -> ScoreHead:
        return ScoreHead(self.activation, None if self.score is None else self.score.to(device))
