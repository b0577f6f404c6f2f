"""A beam search as plain values, from which it can go on elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler_service.core.sampling_params import BeamParams


@dataclass(frozen=True, slots=True)
class BeamState:
    """A live beam, or an ended one with its score: output tokens and the sum of their logprobs."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class SearchState:
    """A search after `num_tokens` tokens, with its parameters."""

    params: BeamParams
    n: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    num_tokens: int
    live: Items[BeamState]
    ended: Items[BeamState]
