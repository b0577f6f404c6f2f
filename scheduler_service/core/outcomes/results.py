"""What the rows of a step bring: tokens, ends, logprobs, full blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.endings import Endings
from scheduler_service.core.outcomes.beams import Beams
from scheduler_service.core.outcomes.losses import Losses
from scheduler_service.core.outcomes.row_failures import RowFailures
from scheduler_service.core.outcomes.shortfalls import Shortfalls
from scheduler_service.core.outcomes.step_tokens import StepTokens
from scheduler_service.core.placement import Placement
from scheduler_service.core.plan import (
    RowWork,
    StepEvents,
    StepOutcome,
    StepPlan,
    TokenEvent,
)
from scheduler_service.core.request import (
    BoolArray,
    FinishReason,
    Int32Array,
    Int64Array,
    ScoredToken,
    Sequence,
)
from scheduler_service.core.row_columns import ONE, ZERO


class Results:
    """Applies results of executed steps to rows and requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        placement: Placement,
        losses: Losses,
        endings: Endings,
        shortfalls: Shortfalls,
    ) -> None:
        self._config = config
        self._block_size: Int32Array = np.array(config.block_size, np.int32)
        self._placement = placement
        self._shortfalls = shortfalls
        self._rows = placement.rows
        self._failures = RowFailures(placement, losses)
        self._endings = endings
        self._beams = Beams(config, placement)

    def take(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        """Takes what an executed step brought, and `OutcomeChecks` let through."""
        work, rows, sampling = plan.work, self._rows, plan.work.samples
        if outcome.row_statuses is not None:
            sampling = self._failures.take(plan, outcome, np.asarray(outcome.row_statuses))
        tokens = StepTokens.of(outcome)
        if work.num_more_tokens is not None:
            self._shortfalls.settle(work, outcome.counts)
        is_current = rows.stay_ids[work.row_ids] == work.stay_ids
        all_current = np.count_nonzero(is_current) == len(work.row_ids)
        departed = {} if all_current else self._departed(work, sampling)
        indexes: Int64Array | None = None
        row_ids = work.row_ids
        if not all_current or sampling is not None:
            indexes = np.flatnonzero(is_current if sampling is None else is_current & sampling)
            row_ids, tokens = row_ids[indexes], tokens.take(indexes)
        special = {} if not rows.num_not_plain else self._special(row_ids, indexes)
        if special:
            is_plain = rows.is_plain[row_ids]
            row_ids, tokens = row_ids[is_plain], tokens.take(np.flatnonzero(is_plain))
        if outcome.prompt_logprobs:
            self._take_prompt_logprobs(plan, outcome, events)
        # Ends come last: whoever ends gives up its row.
        self._append(row_ids, tokens)
        if special:
            self._append_special(special, outcome)
        if self._config.prefix_caching:
            self._publish_decoded(plan, outcome, None if all_current else is_current)
        if special:
            self._take_special(special, outcome, events)
        self._take_tokens(row_ids, tokens, events)
        if departed:
            self._take_departed(departed, outcome, events)

    # -- whose they are ------------------------------------------------------------------------

    def _special(self, row_ids: Int64Array, indexes: Int64Array | None) -> dict[int, Sequence]:
        """Beams, and sequences of requests with several or with logprobs, by index in the step."""
        positions = np.flatnonzero(~self._rows.is_plain[row_ids])
        in_step = positions if indexes is None else indexes[positions]
        each = zip(in_step.tolist(), row_ids[positions].tolist(), strict=True)
        return {index: self._rows.sequence(row_id) for index, row_id in each}

    def _departed(self, work: RowWork, sampling: BoolArray | None) -> dict[int, Sequence]:
        """Sequences that were preempted while the step sampled for them, by index in it."""
        found = self._placement.departures.sequences
        return {
            index: found[stay_id]
            for index, stay_id in enumerate(work.stay_ids.tolist())
            if stay_id in found and (sampling is None or sampling[index])
        }

    # -- tokens --------------------------------------------------------------------------------

    def _take_tokens(self, row_ids: Int64Array, tokens: StepTokens, events: StepEvents) -> None:
        """Tokens of plain requests in their rows, which have them."""
        keys = self._rows.client_keys[row_ids]
        events.client_keys = keys if tokens.counts is None else np.repeat(keys, tokens.counts)
        events.token_ids = tokens.token_ids
        self._finish_stopped(row_ids, tokens.last)

    def _append(self, row_ids: Int64Array, tokens: StepTokens) -> None:
        """Appends tokens to sequences in rows."""
        rows = self._rows
        if self._placement.queue.charges_outputs:
            self._charge(row_ids, tokens.counts)
        if tokens.counts is not None:
            rows.append_tokens(row_ids, tokens.counts, tokens.token_ids)
        else:
            num_known = rows.num_known[row_ids]
            rows.token_ids[row_ids, num_known.astype(np.int64)] = tokens.token_ids
            rows.num_known[row_ids] = num_known + ONE
        if rows.num_without_promise:
            rows.keep_promises(row_ids)

    def _finish_stopped(self, row_ids: Int64Array, last_token_ids: Int32Array) -> None:
        """Ends sequences in rows that end with their last token."""
        rows = self._rows
        may_end = self._placement.may_stop[last_token_ids.astype(np.int64)]
        may_end |= rows.num_known[row_ids] >= rows.stop_len[row_ids]
        if np.count_nonzero(may_end):
            for row_id in row_ids[may_end].tolist():
                self._endings.finish_if_stopped(rows.sequence(row_id))

    def _append_special(self, special: Mapping[int, Sequence], outcome: StepOutcome) -> None:
        """Tokens of requests with several sequences or logprobs; beams choose theirs later."""
        indexes = [i for i, s in special.items() if s.request.params.beam is None]
        if indexes:
            row_ids = np.array([special[index].row_id for index in indexes], np.int64)
            self._append(row_ids, StepTokens.of(outcome).take(np.array(indexes, np.int64)))

    def _take_special(
        self, special: Mapping[int, Sequence], outcome: StepOutcome, events: StepEvents
    ) -> None:
        """What the tokens of requests mean that have several sequences or logprobs; and beams."""
        indexes = [i for i, s in special.items() if not self._take_candidates(s, i, outcome)]
        for index in indexes:
            self._add_events(special[index], index, outcome, events)
        if indexes:
            row_ids = np.array([special[index].row_id for index in indexes], np.int64)
            last = np.array([outcome.tokens_of(index)[-1] for index in indexes], np.int32)
            self._finish_stopped(row_ids, last)
        self._advance_beams(special.values())

    def _take_departed(
        self, departed: Mapping[int, Sequence], outcome: StepOutcome, events: StepEvents
    ) -> None:
        """Tokens of sequences that were preempted while the step was in flight."""
        for index, sequence in departed.items():
            if self._take_candidates(sequence, index, outcome):
                continue
            token_ids = np.array(outcome.tokens_of(index), np.int32)
            sequence.token_ids = np.concatenate([sequence.token_ids, token_ids])
            # The first one by a grammar was not promised.
            sequence.num_promised = max(sequence.num_promised - len(token_ids), 0)
            self.charge_tenant(sequence.request.scheduling.tenant, len(token_ids))
            self._add_events(sequence, index, outcome, events)
            self._endings.finish_if_stopped(sequence)
        self._advance_beams(departed.values())

    def _take_candidates(self, sequence: Sequence, index: int, outcome: StepOutcome) -> bool:
        """Takes the most probable next tokens of a beam; returns False if it is none.

        The tenant is charged one token for each beam, whichever of them the search keeps.
        """
        if sequence.request.params.beam is None:
            return False
        sequence.candidates = outcome.logprobs[index][0].top
        self.charge_tenant(sequence.request.scheduling.tenant, 1)
        return True

    def _add_events(
        self, sequence: Sequence, index: int, outcome: StepOutcome, events: StepEvents
    ) -> None:
        token_ids = outcome.tokens_of(index)
        scores: Items[ScoredToken | None] = outcome.logprobs.get(index, ())
        scores = scores or [None] * len(token_ids)
        for token_id, scored in zip(token_ids, scores, strict=True):
            if scored is not None:
                sequence.cumulative_logprob += scored.logprob
            if sequence.request.params.is_streamed:
                events.tokens.append(TokenEvent(sequence, token_id, scored))
            elif sequence.request.params.num_logprobs is not None and scored is not None:
                sequence.scored.append(scored)

    def _charge(self, row_ids: Int64Array, counts: Int32Array | None) -> None:
        """Tells a fair policy whose tokens these are."""
        tokens_of = Counter[str]()
        each = [1] * len(row_ids) if counts is None else counts.tolist()
        for row_id, count in zip(row_ids.tolist(), each, strict=True):
            tokens_of[self._rows.sequence(row_id).request.scheduling.tenant] += count
        for tenant, num_tokens in tokens_of.items():
            self.charge_tenant(tenant, num_tokens)

    def charge_tenant(self, tenant: str, num_tokens: int) -> None:
        if self._placement.queue.charges_outputs:
            self._placement.num_sampled[tenant] += num_tokens

    # -- ends ----------------------------------------------------------------------------------

    def _advance_beams(self, sequences: Iterable[Sequence]) -> None:
        """Those of the searches of `sequences` go on of which all candidates are known."""
        requests = {s.request: None for s in sequences if s.request.params.beam is not None}
        for request in requests:
            if not self._beams.advance(request):
                continue
            if request.completions:
                self._placement.finish(request, request.completions[0].finish_reason)
            else:
                error = ("INVALID_LOGITS", "every token that may follow has probability 0")
                self._placement.finish(request, FinishReason.ERROR, error)

    # -- the rest ------------------------------------------------------------------------------

    def _publish_decoded(
        self, plan: StepPlan, outcome: StepOutcome, is_current: BoolArray | None
    ) -> None:
        """Blocks that were filled by sampled tokens, which are known by now, become findable."""
        work, block_size = plan.work, self._block_size
        if work.num_more_tokens is not None:
            self._publish_runs(work, outcome.counts, is_current)
            return
        ends = work.num_computed_tokens + ONE
        is_full = ends % block_size == ZERO
        if not np.count_nonzero(is_full):
            return
        is_full &= work.sampled_steps_back > ZERO
        if is_current is not None:
            is_full &= is_current
        row_ids, indexes = work.row_ids[is_full], ends[is_full] // block_size - ONE
        self._placement.blocks.prefixes.publish_rows(self._rows, row_ids, indexes)

    def _publish_runs(
        self, work: RowWork, counts: Int32Array, is_current: BoolArray | None
    ) -> None:
        """The same where rows have got several tokens: all of them but the last are computed."""
        starts = work.num_computed_tokens
        # A block that ends with a literal token was findable before.
        firsts = (starts + (work.sampled_steps_back == ZERO)) // self._block_size
        ends = (starts + counts) // self._block_size
        if is_current is not None:
            ends = np.where(is_current, ends, firsts)
        while np.count_nonzero(is_full := firsts < ends):
            row_ids, indexes = work.row_ids[is_full], firsts[is_full].astype(np.int64)
            self._placement.blocks.prefixes.publish_rows(self._rows, row_ids, indexes)
            firsts += is_full

    def _take_prompt_logprobs(
        self, plan: StepPlan, outcome: StepOutcome, events: StepEvents
    ) -> None:
        work = plan.work
        for index, scored in outcome.prompt_logprobs.items():
            sequence = self._placement.sequence_of(
                int(work.row_ids[index]), int(work.stay_ids[index])
            )
            if sequence is None:
                continue
            request = sequence.request
            # After a recompute, or from a second sequence, the first of them were sent before.
            new = [token for token in scored if token.position > request.num_prompt_logprobs_sent]
            if new:
                events.prompt_logprobs.append((request, new))
                request.num_prompt_logprobs_sent += len(new)
