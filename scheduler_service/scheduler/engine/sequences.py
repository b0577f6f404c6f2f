"""Ends of sequences whose last token is known, and siblings that join by sharing KV."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement, running
from scheduler_service.scheduler.values import Completion, FinishReason, Request, Sequence
from scheduler_service.scheduler.values import SequenceStatus as Status


class SequenceEndings:
    """Ends sequences whose last token stops them, and completes their requests."""

    def __init__(self, placement: Placement, siblings: Siblings) -> None:
        self._placement = placement
        self._siblings = siblings

    def finish_if_stopped(self, sequence: Sequence) -> None:
        """Ends a sequence at a stop token or its length limit; with the last one, its request."""
        request = sequence.request
        tokens = self._placement.known_tokens(sequence)
        num_tokens, last = len(tokens), int(tokens[-1])
        if request.params.pooling is not None:
            sequence.finish_reason = FinishReason.STOP
        elif last in request.stop_token_ids:
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
    """Returns the `n` sequences with the highest mean logprob per output token, best first.

    Ties are ordered by index. A stop token counts as a token. A sequence without output tokens
    comes last.
    """
    return sorted(sequences, key=lambda s: (-_mean_logprob(s), s.index))[:n]


def _mean_logprob(sequence: Sequence) -> float:
    if sequence.num_output_tokens == 0:
        return -math.inf
    return sequence.cumulative_logprob / sequence.num_output_tokens


# -- Siblings --------------------------------------------------------------------------------------


class Siblings:
    """Finds the KV that sequences of one request can share, so that one joins from another."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rows = placement.rows

    def join_before_end(self, leaving: Sequence) -> None:
        """Joins waiting siblings if `leaving`, which ends, is the last sequence with KV to share.

        Takes free blocks only. A sibling for which there are none recomputes the prompt.
        """
        request, placement, blocks = leaving.request, self._placement, self._placement.blocks
        if list(running(request)) != [leaving]:
            return
        for sequence in request.unfinished:
            if sequence.status is not Status.WAITING:
                continue
            num_shared = self._num_common(leaving, sequence)
            first_needed = blocks.prefixes.first_block_needed(num_shared)
            is_there = self._rows.num_released[leaving.row_id] <= first_needed
            if is_there and blocks.num_fork_blocks(sequence, num_shared) <= blocks.device.num_free:
                placement.join(sequence, leaving, num_shared)

    def closest(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """Returns the running sibling that shares most tokens with `sequence`, and how many.

        Returns (None, 0) while that sibling has not computed these tokens, or is itself being
        placed by this step.
        """
        best: Sequence | None = None
        most = -1
        for sibling in running(sequence.request):
            common = self._num_common(sibling, sequence)
            if common > most:
                best, most = sibling, common
        if best is None or best.row_id in self._placement.draft.new_rows:
            return None, 0
        return (best, most) if self._rows.num_computed[best.row_id] >= most else (None, 0)

    def _num_common(self, sibling: Sequence, sequence: Sequence) -> int:
        """Returns how many leading tokens `sequence` shares with a running sibling.

        The last token of `sequence`, which has no row, never counts: it is still to be computed.
        """
        known = self._rows.known_tokens(sibling.row_id)
        length = min(len(known), len(sequence.token_ids))
        differs = np.flatnonzero(known[:length] != sequence.token_ids[:length])
        common = int(differs[0]) if len(differs) else length
        return min(common, len(sequence.token_ids) - 1)
