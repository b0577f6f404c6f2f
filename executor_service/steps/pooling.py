"""Vectors that rows return instead of tokens: what a model has, and what a row asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PoolingTask(Enum):
    """Kind of vector: the embedding of a text, or a classifier's score of each label."""

    EMBEDDING = "embedding"
    SCORES = "scores"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Vector that a row returns; meanings and ranges as of `PoolingParams` in `executor.proto`.

    `num_dimensions`: 0 for all. `raw`: without the last step, normalisation or activation.
    `second_text_start`: position of the first token of the second text; 0 for one text.
    """

    task: PoolingTask
    num_dimensions: int = 0
    raw: bool = False
    second_text_start: int = 0


@dataclass(frozen=True, slots=True)
class ModelVectors:
    """Vectors that a model returns.

    `embedding_size`: 0 without embeddings. `labels`: names of the classifier's labels, in order of
    their scores; empty without a classifier. `is_uncached`: all tokens of a row are the input of
    one step, and have no blocks.
    """

    embedding_size: int
    labels: tuple[str, ...]
    is_uncached: bool

    @property
    def plain_params(self) -> PoolingParams:
        """Parameters of a row that asks for the model's vector as it is."""
        is_embedding = self.embedding_size > 0
        return PoolingParams(PoolingTask.EMBEDDING if is_embedding else PoolingTask.SCORES)
