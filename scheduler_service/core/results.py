"""What the rows of a step bring: tokens, ends, logprobs, full blocks, failures."""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler_service.core.beams import Beams
from scheduler_service.core.best_of import rank_completions
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.losses import Losses
from scheduler_service.core.placement import Placement
from scheduler_service.core.plan import (
    RowStatus,
    StepEvents,
    StepOutcome,
    StepPlan,
    TokenEvent,
)
from scheduler_service.core.request import (
    Completion,
    FinishReason,
    Int32Array,
    Request,
    ScoredToken,
    Sequence,
)
from scheduler_service.core.row_columns import BoolArray, Int64Array


class Results:
    """Applies results of executed steps to rows and requests."""

    def __init__(self, config: SchedulerConfig, placement: Placement, losses: Losses) -> None:
        self._config = config
        self._placement = placement
        self._rows = placement.rows
        self._losses = losses
        self._beams = Beams(config, placement)
        # Tokens that end some sequence. Others need no second look.
        self._may_stop = np.zeros(config.vocab_size, np.bool_)

    def expect(self, request: Request) -> None:
        """Gets ready for the tokens of a request."""
        self._may_stop[list(request.stop_token_ids)] = True

    def take(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        """Takes what an executed step brought, and `OutcomeChecks` let through."""
        if outcome.row_statuses is not None:
            self._take_failures(plan, outcome)
        for index, scored in outcome.prompt_logprobs.items():
            self._take_prompt_logprobs(plan, index, list(scored), events)
        work = plan.work
        is_current = self._rows.tenancies[work.row_ids] == work.tenancies
        all_current = np.count_nonzero(is_current) == len(work.row_ids)
        if self._config.prefix_caching:
            self._publish_decoded(plan, None if all_current else is_current)
        token_ids = outcome.token_ids
        if all_current and work.samples is None:
            self._take_tokens(work.row_ids, token_ids, None, outcome, events)
            return
        if work.samples is not None:
            is_current = is_current & work.samples
        indexes = np.flatnonzero(is_current)
        self._take_tokens(work.row_ids[indexes], token_ids[indexes], indexes, outcome, events)
        if not all_current:
            self._take_departed(plan, outcome, events)

    # -- tokens --------------------------------------------------------------------------------

    def _take_tokens(
        self,
        row_ids: Int64Array,
        token_ids: Int32Array,
        indexes: Int64Array | None,
        outcome: StepOutcome,
        events: StepEvents,
    ) -> None:
        """Tokens of sequences that are still in their rows. `indexes`: of the rows, in the step."""
        rows = self._rows
        if len(row_ids) == 0:
            return
        if rows.num_not_plain:
            if indexes is None:
                indexes = np.arange(len(row_ids))
            is_plain = rows.is_plain[row_ids]
            self._take_special(
                row_ids[~is_plain], token_ids[~is_plain], indexes[~is_plain], outcome, events
            )
            row_ids, token_ids = row_ids[is_plain], token_ids[is_plain]
        events.client_keys = rows.client_keys[row_ids]
        events.token_ids = token_ids
        self._record(row_ids, token_ids)

    def _record(self, row_ids: Int64Array, token_ids: Int32Array) -> None:
        """Appends tokens to sequences in rows, and ends those that end with them."""
        rows = self._rows
        if self._placement.waiting.charges_outputs:
            self._charge(row_ids)
        num_known = rows.num_known[row_ids]
        rows.token_ids[row_ids, num_known] = token_ids
        num_known += 1
        rows.num_known[row_ids] = num_known
        may_end = self._may_stop[token_ids]
        may_end |= num_known >= rows.stop_len[row_ids]
        if np.count_nonzero(may_end):
            for row_id in row_ids[may_end].tolist():
                self.finish_if_stopped(rows.sequence(row_id))

    def _take_special(
        self,
        row_ids: Int64Array,
        token_ids: Int32Array,
        indexes: Int64Array,
        outcome: StepOutcome,
        events: StepEvents,
    ) -> None:
        """Tokens of beams, and of requests with several sequences or logprobs."""
        rows = self._rows
        beams: dict[Request, None] = {}
        chosen: list[int] = []
        each = zip(row_ids.tolist(), token_ids.tolist(), indexes.tolist(), strict=True)
        for position, (row_id, token_id, index) in enumerate(each):
            sequence, scored = rows.sequence(row_id), outcome.logprobs.get(index)
            if sequence.request.params.beam is not None:
                self._beams.take(sequence, scored)
                beams[sequence.request] = None
                continue
            chosen.append(position)
            self._add_event(sequence, token_id, scored, events)
        self._record(row_ids[chosen], token_ids[chosen])
        for request in beams:
            self._advance_beams(request)

    def _take_departed(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        """Tokens of sequences that were preempted while the step was in flight."""
        samples = plan.work.samples
        for index, tenancy in enumerate(plan.work.tenancies.tolist()):
            sequence = self._placement.departures.sequences.get(tenancy)
            if sequence is None or (samples is not None and not samples[index]):
                continue
            token_id = int(outcome.token_ids[index])
            scored = outcome.logprobs.get(index)
            if sequence.request.params.beam is not None:
                self._beams.take(sequence, scored)
                self._advance_beams(sequence.request)
                continue
            sequence.token_ids = np.append(sequence.token_ids, np.int32(token_id))
            sequence.num_promised -= 1
            self._placement.waiting.sampled(sequence.request.scheduling.tenant, 1)
            self._add_event(sequence, token_id, scored, events)
            self.finish_if_stopped(sequence)

    def _add_event(
        self, sequence: Sequence, token_id: int, scored: ScoredToken | None, events: StepEvents
    ) -> None:
        if scored is not None:
            sequence.cumulative_logprob += scored.logprob
        if sequence.request.params.is_streamed:
            events.tokens.append(TokenEvent(sequence, token_id, scored))
        elif sequence.request.params.num_logprobs is not None and scored is not None:
            sequence.scored.append(scored)

    def _charge(self, row_ids: Int64Array) -> None:
        """Tells a fair policy whose tokens these are."""
        sequences = map(self._rows.sequence, row_ids.tolist())
        tokens_of = Counter(sequence.request.scheduling.tenant for sequence in sequences)
        for tenant, num_tokens in tokens_of.items():
            self._placement.waiting.sampled(tenant, num_tokens)

    # -- ends ----------------------------------------------------------------------------------

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

    def _advance_beams(self, request: Request) -> None:
        if self._beams.advance(request):
            if request.completions:
                self._placement.finish(request, request.completions[0].finish_reason)
            else:
                error = ("INVALID_LOGITS", "every token that may follow has probability 0")
                self._placement.finish(request, FinishReason.ERROR, error)

    # -- the rest ------------------------------------------------------------------------------

    def _publish_decoded(self, plan: StepPlan, is_current: BoolArray | None) -> None:
        """Blocks that were filled by sampled tokens, which are known by now, become findable."""
        work, block_size = plan.work, self._config.block_size
        ends = work.num_computed_tokens + 1
        is_full = ends % block_size == 0
        if not np.count_nonzero(is_full):
            return
        is_full &= work.sampled_steps_back > 0
        if is_current is not None:
            is_full &= is_current
        row_ids, indexes = work.row_ids[is_full], ends[is_full] // block_size - 1
        self._placement.blocks.prefixes.publish_rows(self._rows, row_ids, indexes)

    def _take_prompt_logprobs(
        self, plan: StepPlan, index: int, scored: list[ScoredToken], events: StepEvents
    ) -> None:
        # After a recompute, or from a second sequence, the first of them were sent before.
        sequence = self._placement.tenant(
            int(plan.work.row_ids[index]), int(plan.work.tenancies[index])
        )
        if sequence is None:
            return
        request = sequence.request
        new = [token for token in scored if token.position > request.num_prompt_logprobs_sent]
        if new:
            request.num_prompt_logprobs_sent += len(new)
            events.prompt_logprobs.append((request, new))

    def _take_failures(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Ends the requests of failed rows; what leaned on these is computed again."""
        work = plan.work
        statuses = np.asarray(outcome.row_statuses, np.int64)
        spoiled: list[int] = []
        for index in np.flatnonzero(statuses != RowStatus.OK).tolist():
            tenancy = int(work.tenancies[index])
            spoiled.append(tenancy)
            sequence = self._placement.tenant(int(work.row_ids[index]), tenancy)
            status = RowStatus(int(statuses[index]))
            if sequence is None:
                continue
            if status is not RowStatus.INPUT_UNAVAILABLE:
                reason = "INVALID_LOGITS" if status is RowStatus.INVALID_LOGITS else "ROW_FAILED"
                message = outcome.row_errors.get(index, "the executor could not compute it")
                request = sequence.request
                self._placement.finish(request, FinishReason.ERROR, (reason, message))
        if spoiled:
            self._losses.lose_rows(plan, spoiled)
