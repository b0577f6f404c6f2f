"""Ends sequences and requests whose last token is known."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

from scheduler_service.core.placement import Placement
from scheduler_service.core.request import Completion, FinishReason, Request, Sequence
from scheduler_service.core.siblings import Siblings


class Endings:
    """Finds out which sequences end with their last token, and completes their requests."""

    def __init__(self, placement: Placement, siblings: Siblings) -> None:
        self._placement = placement
        self._siblings = siblings

    def finish_if_stopped(self, sequence: Sequence) -> None:
        """Ends a sequence if its last token does; and its request with its last sequence."""
        request = sequence.request
        tokens = self._placement.known_tokens(sequence)
        num_tokens, last = len(tokens), int(tokens[-1])
        if last in request.stop_token_ids:
            sequence.finish_reason, sequence.stop_token_id = FinishReason.STOP, last
        elif num_tokens >= request.stop_len:
            max_tokens = request.params.max_tokens
            num_output_tokens = num_tokens - sequence.num_prompt_tokens
            by_length = max_tokens is not None and num_output_tokens >= max_tokens
            sequence.finish_reason = FinishReason.LENGTH if by_length else FinishReason.MODEL_LENGTH
        else:
            return
        self._siblings.join_before_end(sequence)
        self._placement.finish_sequence(sequence)
        if request.params.num_sequences > 1 and request.params.is_streamed:
            self._placement.ended_sequences.append(sequence)
        if not request.unfinished:
            self._complete(request)

    def _complete(self, request: Request) -> None:
        if not request.params.is_streamed:
            best = rank_completions(request.sequences, request.params.n)
            request.completions = [
                Completion(
                    s.token_ids[s.num_prompt_tokens :].tolist(),
                    s.finish_reason or FinishReason.STOP,
                    s.stop_token_id,
                    s.cumulative_logprob,
                    scored=s.scored,
                )
                for s in best
            ]
        first = request.sequences[0].finish_reason
        if request.completions:
            first = request.completions[0].finish_reason
        self._placement.finish(request, first or FinishReason.STOP)


def rank_completions(sequences: Items[Sequence], n: int) -> list[Sequence]:
    """Returns the `n` with the highest mean logprob per output token, best first.

    Equal ones are ordered by index. A stop token counts as a token. A sequence without any output
    token comes last.
    """
    return sorted(sequences, key=lambda s: (-_mean_logprob(s), s.index))[:n]


def _mean_logprob(sequence: Sequence) -> float:
    if sequence.num_output_tokens == 0:
        return -math.inf
    return sequence.cumulative_logprob / sequence.num_output_tokens
