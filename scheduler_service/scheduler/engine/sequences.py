"""Ends sequences and requests whose last token is known."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement, running
from scheduler_service.scheduler.values.request import Completion, FinishReason, Request, Sequence
from scheduler_service.scheduler.values.request import SequenceStatus as Status


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


# --------------------------------------------------------------------------------------------------
# What the sequences of a request have in common, so that one can join by sharing KV of another.


class Siblings:
    """Finds what to share."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rows = placement.rows

    def join_before_end(self, leaving: Sequence) -> None:
        """Siblings that wait join now if `leaving`, which ends, is the last that has KV to share.

        From blocks that are free; for whom there are none, the prompt is computed again.
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
        """The running sequence that shares most with `sequence`, and how many tokens.

        None while that one has not computed them yet, or is itself being placed by this step.
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
        """How many tokens a sequence without a row shares with a running one, less its last."""
        known = self._rows.known_tokens(sibling.row_id)
        length = min(len(known), len(sequence.token_ids))
        differs = np.flatnonzero(known[:length] != sequence.token_ids[:length])
        common = int(differs[0]) if len(differs) else length
        return min(common, len(sequence.token_ids) - 1)
