"""Beams as sequences of a request: they advance in lockstep, and share what they have in common."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from scheduler_service.core.beam_search import BeamSearch
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import Completion, FinishReason, Int32Array, Request, Sequence


class Beams:
    """Turns what a beam search decides into sequences that go on, fork and end."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement

    def advance(self, request: Request) -> bool:
        """Chooses the next beams if all candidates are known; True if the search is finished.

        `request.completions` then has the result.
        """
        live = request.unfinished
        candidates = [sequence.candidates for sequence in live]
        known = [tokens for tokens in candidates if tokens is not None]
        if len(known) < len(live):
            return False
        search = request.search
        assert search is not None
        selection = search.advance(known)
        if selection.is_finished:
            request.completions = self._completions(request, search)
            return True
        request.sequences = self._continue(live, selection.beams)
        for sequence in live:
            if sequence not in request.sequences:
                self._placement.finish_sequence(sequence)
        return False

    def _continue(self, live: list[Sequence], beams: Items[tuple[int, int]]) -> list[Sequence]:
        """The sequences of the new beams: the first child of each takes the place of its parent."""
        placement = self._placement
        tokens_before = [placement.known_tokens(sequence).copy() for sequence in live]
        continued: set[int] = set()
        sequences: list[Sequence] = []
        for parent_index, token_id in beams:
            parent = live[parent_index]
            if parent_index in continued:
                tokens = np.append(tokens_before[parent_index], np.int32(token_id))
                sequences.append(self._fork(parent, tokens))
            else:
                continued.add(parent_index)
                placement.append_token(parent, token_id)
                sequences.append(parent)
        for sequence in live:
            sequence.candidates = None
        return sequences

    def _fork(self, parent: Sequence, tokens: Int32Array) -> Sequence:
        request = parent.request
        request.num_forks += 1
        return Sequence(
            request,
            request.num_forks,
            tokens,
            parent.num_prompt_tokens,
            parent.seed,
            block_hashes=parent.block_hashes[: (len(tokens) - 1) // self._config.block_size + 1],
        )

    def _completions(self, request: Request, search: BeamSearch) -> list[Completion]:
        return [
            Completion(
                list(hypothesis.token_ids),
                self._reason(request, hypothesis.stop_token_id, len(hypothesis.token_ids)),
                hypothesis.stop_token_id,
                hypothesis.cumulative_logprob,
                score=hypothesis.score,
            )
            for hypothesis in search.hypotheses
        ]

    def _reason(
        self, request: Request, stop_token_id: int | None, num_output_tokens: int
    ) -> FinishReason:
        if stop_token_id is not None:
            return FinishReason.STOP
        max_tokens = request.params.max_tokens
        by_length = max_tokens is not None and num_output_tokens >= max_tokens
        return FinishReason.LENGTH if by_length else FinishReason.MODEL_LENGTH
