"""Beam search of one request, from logprobs alone: the search, and its state as values.

Of all continuations of the live beams, the best `width` that do not end a sequence live on. A
continuation that ends its sequence (by a stop token, or at the maximum length) becomes a hypothesis
if it is among the best `width` of all continuations; the best `width` hypotheses are kept.

For equal logprobs the results equal those of `generate` of Hugging Face transformers 5 with
`num_beams > 1`, with two differences. There, -1e9 stands for "no beam", which shows where the
vocabulary is smaller than `width` plus the number of stop tokens, or where a score is below -1e9;
here, fewer beams are live then. And here sums are not rounded to float32, and ties are not left to
chance: the earlier beam wins, then the smaller token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import assert_never

from scheduler_service.scheduler.values.sampling_params import BeamParams, EarlyStopping


@dataclass(frozen=True, slots=True)
class BeamSelection:
    """Live beams after a step, best first, as (index of the parent beam, token id).

    The parent's index counts the beams that were live before the step. A parent may occur several
    times or not at all. There are no beams if the search is finished.
    """

    beams: Items[tuple[int, int]]
    is_finished: bool


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Finished output. `token_ids` and both numbers include the stop token, if there is one.

    `score`: cumulative_logprob / len(token_ids) ** length_penalty. `stop_token_id`: None if the
    maximum length ended the output.
    """

    token_ids: tuple[int, ...]
    score: float
    cumulative_logprob: float
    stop_token_id: int | None


@dataclass(frozen=True, slots=True)
class BeamState:
    """Output tokens and summed logprob of a live beam, or of an ended one with its score."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class SearchState:
    """State of a search after `num_tokens` tokens, with its parameters."""

    params: BeamParams
    n: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    num_tokens: int
    live: Items[BeamState]
    ended: Items[BeamState]


# -cumulative_logprob, parent index, token id: so that the smallest is the best.
_Continuation = tuple[float, int, int]


class BeamSearch:
    """Live beams and hypotheses of one request; `advance` is one step.

    The search begins with one live beam, the prompt. `max_tokens` (at least 1): number of output
    tokens at which a sequence ends. No stop token is chosen before a sequence has `min_tokens`.
    """

    def __init__(
        self,
        params: BeamParams,
        *,
        n: int,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        assert 1 <= n <= params.width, f"n is {n}; allowed: 1 to {params.width}"
        assert max_tokens >= 1, f"max_tokens is {max_tokens}; allowed: 1 or more"
        self._params = params
        self._n = n
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self._num_tokens = 0
        self._live = [BeamState((), 0.0)]
        self._ended: list[BeamState] = []

    @property
    def max_tokens(self) -> int:
        """Number of output tokens at which a sequence ends."""
        return self._max_tokens

    @property
    def num_candidates(self) -> int:
        """Number of best tokens that `advance` needs of each live beam.

        Even if all stop tokens are among them, `width` other tokens are left.
        """
        return self._params.width + len(self._stop_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the search is finished; `advance` must not be called then."""
        return not self._live

    @property
    def state(self) -> SearchState:
        """Complete state of the search; `from_state` continues from it."""
        limits = self._max_tokens, self._min_tokens, self._stop_token_ids
        beams = tuple(self._live), tuple(self._ended)
        return SearchState(self._params, self._n, *limits, self._num_tokens, *beams)

    @classmethod
    def from_state(cls, state: SearchState) -> BeamSearch:
        """Returns a search that continues from `state`."""
        search = cls(
            state.params,
            n=state.n,
            max_tokens=state.max_tokens,
            min_tokens=state.min_tokens,
            stop_token_ids=state.stop_token_ids,
        )
        search._num_tokens = state.num_tokens
        search._live, search._ended = list(state.live), list(state.ended)
        return search

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """Best `n` hypotheses found so far, best first.

        A finished search has fewer only if there were no more continuations with a logprob above
        -inf.
        """
        return [self._describe(ended) for ended in self._ended[: self._n]]

    def advance(self, candidates: Items[Items[tuple[int, float]]]) -> BeamSelection:
        """Appends a token to every live beam: `candidates[i]` are (token id, logprob) of beam i.

        Candidates are the `num_candidates` best tokens of the beam in any order (all tokens, if the
        vocabulary is smaller); further candidates are allowed. Logprobs are normalized over the
        whole vocabulary. Raises ValueError if the number of `candidates` differs from that of the
        live beams.
        """
        assert not self.is_finished, "the beam search is finished"
        continuations = self._rank_continuations(candidates)
        self._num_tokens += 1
        width = self._params.width
        ending = [c for c in continuations[:width] if self._ends(c[2])]
        lasting = [c for c in continuations if not self._ends(c[2])][:width]
        self._record([self._extend(c) for c in ending])
        self._live = [self._extend(c) for c in lasting]
        if self._live and not self._can_improve():
            self._live = []
        beams = [] if self.is_finished else [(parent, token_id) for _, parent, token_id in lasting]
        return BeamSelection(beams, self.is_finished)

    def _rank_continuations(
        self, candidates: Items[Items[tuple[int, float]]]
    ) -> list[_Continuation]:
        """Returns the continuations of the live beams, best first."""
        refused = self._stop_token_ids if self._num_tokens < self._min_tokens else frozenset()
        return sorted(
            (-(beam.cumulative_logprob + logprob), parent, token_id)
            for parent, (beam, tokens) in enumerate(zip(self._live, candidates, strict=True))
            for token_id, logprob in tokens
            if token_id not in refused and logprob > -math.inf
        )

    def _ends(self, token_id: int) -> bool:
        return self._num_tokens >= self._max_tokens or token_id in self._stop_token_ids

    def _extend(self, continuation: _Continuation) -> BeamState:
        negated_logprob, parent, token_id = continuation
        return BeamState((*self._live[parent].token_ids, token_id), -negated_logprob)

    def _record(self, beams: list[BeamState]) -> None:
        """Adds ended beams and keeps the best `width` hypotheses; older ones win ties."""
        found = [
            replace(beam, score=self._score(beam.cumulative_logprob, self._num_tokens))
            for beam in beams
        ]
        self._ended = sorted(self._ended + found, key=lambda e: -e.score)[: self._params.width]

    def _can_improve(self) -> bool:
        """Returns whether the live beams continue, according to `EarlyStopping`."""
        if len(self._ended) < self._params.width:
            return True
        length = self._num_tokens
        match self._params.early_stopping:
            case EarlyStopping.ALWAYS:
                return False
            case EarlyStopping.HEURISTIC:
                pass
            case EarlyStopping.NEVER:
                if self._params.length_penalty > 0.0:
                    length = self._max_tokens
            case _:
                assert_never(self._params.early_stopping)
        best_possible = self._score(self._live[0].cumulative_logprob, length)
        return best_possible > self._ended[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        score: float = cumulative_logprob / length**self._params.length_penalty
        return score

    def _describe(self, ended: BeamState) -> Hypothesis:
        last = ended.token_ids[-1]
        return Hypothesis(
            ended.token_ids,
            ended.score,
            ended.cumulative_logprob,
            last if last in self._stop_token_ids else None,
        )
