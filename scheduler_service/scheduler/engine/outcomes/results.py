"""Results of steps: new tokens, ends, logprobs, full blocks, beams and shortfalls of tokens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np

from scheduler_service.scheduler.engine.outcomes.losses import FailureRecovery, RowFailures
from scheduler_service.scheduler.engine.outcomes.step_parts import StepParts
from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.row_columns import ONE, ZERO
from scheduler_service.scheduler.engine.sequences import SequenceEndings
from scheduler_service.scheduler.values import (
    BeamSearch,
    BoolArray,
    Completion,
    FinishReason,
    Int32Array,
    Int64Array,
    Request,
    RowWork,
    SchedulerConfig,
    ScoredToken,
    Sequence,
    SequenceStatus,
    StepEvents,
    StepOutcome,
    StepPart,
    StepPlan,
    TokenEvent,
)


class Results:
    """Applies results of executed steps, and their `parts`, to rows and requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        placement: Placement,
        losses: FailureRecovery,
        endings: SequenceEndings,
        shortfalls: PromisedTokenRollback,
        parts: StepParts,
    ) -> None:
        self._config = config
        self._block_size: Int32Array = np.array(config.block_size, np.int32)
        self._last_in_block: Int32Array = self._block_size - ONE
        self._placement = placement
        self._shortfalls = shortfalls
        self._parts = parts
        self._rows = placement.rows
        self._failures = RowFailures(placement, losses)
        self._endings = endings
        self._beams = Beams(config, placement)

    def take(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        """Applies the result of an executed step, checked by `OutcomeChecks`; adds to `events`."""
        work, rows, sampling = plan.work, self._rows, plan.work.samples
        if outcome.row_statuses is not None:
            sampling = self._failures.take(plan, outcome, np.asarray(outcome.row_statuses))
        counts = outcome.counts if work.num_more_tokens is not None else None
        if counts is not None:
            self._shortfalls.settle(work, counts, self._parts.taken if self._parts else None)
        outcome, sampling = self._without_taken(outcome, sampling)
        tokens = StepTokens.of(outcome)
        is_current = rows.find_current(work)
        departed = {} if is_current is None else self._departed(work, sampling)
        indexes: Int64Array | None = None
        row_ids, is_taken = work.row_ids, sampling if is_current is None else is_current
        if is_taken is not None:
            indexes = np.flatnonzero(is_taken if sampling is None else is_taken & sampling)
            row_ids, tokens = row_ids[indexes], tokens.take(indexes)
        special = {} if not rows.num_not_plain else self._special(row_ids, indexes)
        if special:
            is_plain = rows.is_plain[row_ids]
            row_ids, tokens = row_ids[is_plain], tokens.take(np.flatnonzero(is_plain))
        if outcome.prompt_logprobs:
            self._take_prompt_logprobs(plan, outcome, events)
        # Ends come last, because a sequence that ends gives up its row.
        self._append(row_ids, tokens)
        if special:
            self._append_special(special, outcome)
        if self._config.prefix_caching:
            self._publish_decoded(work, counts, is_current)
        if special:
            self._take_special(special, outcome, events)
        self._take_tokens(row_ids, tokens, events)
        if departed:
            self._take_departed(departed, outcome, events)

    def _without_taken(
        self, outcome: StepOutcome, sampling: BoolArray | None
    ) -> tuple[StepOutcome, BoolArray | None]:
        """Returns `outcome` without the tokens taken from parts, and its rows with a token left."""
        if not self._parts:
            return outcome, sampling
        outcome = _without_first(outcome, self._parts.taken)
        has_tokens = outcome.counts > ZERO
        return outcome, has_tokens if sampling is None else sampling & has_tokens

    def take_part(
        self, plan: StepPlan, part: StepPart, faults: Iterable[int], events: StepEvents
    ) -> None:
        """Applies a part of a result, which `parts` has by now, to plain rows; adds to `events`.

        `faults`: rows of the part with tokens that a result may not have. These rows, and others
        with a token that was not taken, wait for the result.
        """
        work, parts, rows = plan.work, self._parts, self._rows
        is_taken = (part.counts > ZERO) & (parts.taken + part.counts == parts.told)
        is_taken &= (rows.stay_ids[work.row_ids] == work.stay_ids) & rows.is_plain[work.row_ids]
        is_taken[list(faults)] = False
        indexes = np.flatnonzero(is_taken)
        if not len(indexes):
            return
        num_before = parts.taken
        parts.take(part.counts * is_taken)
        row_ids = work.row_ids[indexes]
        tokens = StepTokens(part.token_ids, part.counts).take(indexes)
        self._append(row_ids, tokens)
        # The first token of a step is sure beforehand.
        rows.num_unsure[row_ids] -= part.counts[indexes] - (num_before[indexes] == ZERO)
        if self._config.prefix_caching:
            self._publish_runs(work, num_before, parts.taken, is_taken)
        self._take_tokens(row_ids, tokens, events)

    # -- owners --------------------------------------------------------------------------------

    def _special(self, row_ids: Int64Array, indexes: Int64Array | None) -> dict[int, Sequence]:
        """Returns sequences with siblings, logprobs, beams or vectors, by index in the step."""
        positions = np.flatnonzero(~self._rows.is_plain[row_ids])
        in_step = positions if indexes is None else indexes[positions]
        each = zip(in_step.tolist(), row_ids[positions].tolist(), strict=True)
        return {index: self._rows.sequence(row_id) for index, row_id in each}

    def _departed(self, work: RowWork, sampling: BoolArray | None) -> dict[int, Sequence]:
        """Returns sequences preempted while the step sampled for them, by index in the step."""
        found = self._placement.departures.sequences
        return {
            index: found[stay_id]
            for index, stay_id in enumerate(work.stay_ids.tolist())
            if stay_id in found and (sampling is None or sampling[index])
        }

    # -- tokens --------------------------------------------------------------------------------

    def _take_tokens(self, row_ids: Int64Array, tokens: StepTokens, events: StepEvents) -> None:
        """Reports new tokens of plain requests, already in their rows; ends stopped sequences."""
        keys = self._rows.client_keys[row_ids]
        events.client_keys = keys if tokens.counts is None else np.repeat(keys, tokens.counts)
        events.token_ids = tokens.token_ids
        self._finish_stopped(row_ids, tokens.last)

    def _append(self, row_ids: Int64Array, tokens: StepTokens) -> None:
        """Appends tokens to sequences in rows, and charges their tenants."""
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
        """Ends sequences in rows whose last token stops them."""
        rows = self._rows
        may_end = self._placement.may_stop[last_token_ids.astype(np.int64)]
        may_end |= rows.num_known[row_ids] >= rows.stop_len[row_ids]
        if np.count_nonzero(may_end):
            for row_id in row_ids[may_end].tolist():
                self._endings.finish_if_stopped(rows.sequence(row_id))

    def _append_special(self, special: Mapping[int, Sequence], outcome: StepOutcome) -> None:
        """Appends the tokens of sequences with siblings or logprobs; beams choose theirs later."""
        indexes = [i for i, s in special.items() if s.request.params.beam is None]
        if indexes:
            row_ids = np.array([special[index].row_id for index in indexes], np.int64)
            self._append(row_ids, StepTokens.of(outcome).take(np.array(indexes, np.int64)))

    def _take_special(
        self, special: Mapping[int, Sequence], outcome: StepOutcome, events: StepEvents
    ) -> None:
        """Reports tokens of sequences with siblings or logprobs, ends some, and advances beams."""
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
        """Applies the tokens of sequences that were preempted while the step was in flight."""
        for index, sequence in departed.items():
            if self._take_candidates(sequence, index, outcome):
                continue
            token_ids = np.array(outcome.tokens_of(index), np.int32)
            sequence.token_ids = np.concatenate([sequence.token_ids, token_ids])
            # The first token of a row with a grammar was not promised.
            sequence.num_promised = max(sequence.num_promised - len(token_ids), 0)
            self.charge_tenant(sequence.request.scheduling.tenant, len(token_ids))
            self._add_events(sequence, index, outcome, events)
            self._endings.finish_if_stopped(sequence)
        self._advance_beams(departed.values())

    def _take_candidates(self, sequence: Sequence, index: int, outcome: StepOutcome) -> bool:
        """Takes the most probable next tokens of a beam; returns False if the sequence is no beam.

        The tenant is charged one token for each beam, whether or not the search keeps that beam.
        """
        if sequence.request.params.beam is None:
            return False
        sequence.candidates = outcome.logprobs[index][0].top
        self.charge_tenant(sequence.request.scheduling.tenant, 1)
        return True

    def _add_events(
        self, sequence: Sequence, index: int, outcome: StepOutcome, events: StepEvents
    ) -> None:
        if sequence.request.params.pooling is not None:
            sequence.request.vector = outcome.vectors[index]
            return
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
        """Charges the tenants of these rows for their tokens, for a fair queue policy."""
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
        """Advances beam searches whose candidates are all known; ends those that are finished."""
        requests = {s.request: None for s in sequences if s.request.params.beam is not None}
        for request in requests:
            if not self._beams.advance(request):
                continue
            if request.completions:
                self._placement.finish(request, request.completions[0].finish_reason)
            else:
                error = ("INVALID_LOGITS", "all allowed tokens have probability 0")
                self._placement.finish(request, FinishReason.ERROR, error)

    # -- full blocks and prompt logprobs -------------------------------------------------------

    def _publish_decoded(
        self, work: RowWork, counts: Int32Array | None, is_current: BoolArray | None
    ) -> None:
        """Publishes blocks that were filled by sampled tokens, which are known by now.

        `counts`: [R], tokens of each row; None if rows could get one token only.
        """
        block_size = self._block_size
        if counts is not None:
            num_before = self._parts.taken if self._parts else np.zeros_like(counts)
            self._publish_runs(work, num_before, counts, is_current)
            return
        is_full = work.num_computed_tokens % block_size == self._last_in_block
        if not np.count_nonzero(is_full):
            return
        if len(work.token_ids):
            # A block that ends with a literal token was published before.
            is_full &= work.sampled_steps_back > ZERO
        if is_current is not None:
            is_full &= is_current
        row_ids = work.row_ids[is_full]
        indexes = (work.num_computed_tokens[is_full] // block_size).astype(np.int64)
        self._placement.blocks.prefixes.publish_rows(self._rows, row_ids, indexes)

    def _publish_runs(
        self,
        work: RowWork,
        num_before: Int32Array,
        counts: Int32Array,
        is_current: BoolArray | None,
    ) -> None:
        """Publishes filled blocks where rows got several tokens; the last token is not computed.

        `counts`: [R], tokens of each row in this step; the first `num_before` were there before.
        """
        starts = work.num_computed_tokens
        # A block that ends with a literal token was published before.
        num_before = np.maximum(num_before, work.sampled_steps_back == ZERO)
        firsts = (starts + num_before) // self._block_size
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
            # After a recompute, or from a second sequence, the first scores were sent before.
            new = [token for token in scored if token.position > request.num_prompt_logprobs_sent]
            if new:
                events.prompt_logprobs.append((request, new))
                request.num_prompt_logprobs_sent += len(new)


# -- Beams -----------------------------------------------------------------------------------------


class Beams:
    """Applies beam searches: beams are sequences of a request that go on, fork and end.

    The beams of a request advance in lockstep, and share the KV that they have in common.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement

    def advance(self, request: Request) -> bool:
        """Chooses the next beams if all candidates are known; True if the search is finished.

        In that case `request.completions` has the result.
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
        """Returns the sequences of the new beams: a parent's first child takes its place.

        Further children are forks without a row.
        """
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


# -- Step tokens -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of some rows of a step, row by row.

    `counts[i]` of `token_ids` belong to row i; None: one token each.
    """

    token_ids: Int32Array
    counts: Int32Array | None

    @classmethod
    def of(cls, outcome: StepOutcome) -> StepTokens:
        """Returns the tokens of all rows of a step."""
        return cls(outcome.token_ids, outcome.token_counts)

    def take(self, rows: Int64Array) -> StepTokens:
        """Returns the tokens of `rows`, which are ascending indexes."""
        if self.counts is None:
            return StepTokens(self.token_ids[rows], None)
        is_taken = np.zeros(len(self.counts), np.bool_)
        is_taken[rows] = True
        return StepTokens(self.token_ids[np.repeat(is_taken, self.counts)], self.counts[rows])

    @property
    def last(self) -> Int32Array:
        """Last token of each row, [R] int32; each row must have one."""
        if self.counts is None:
            return self.token_ids
        return self.token_ids[np.cumsum(self.counts) - 1]


def _without_first(outcome: StepOutcome, taken: Int32Array) -> StepOutcome:
    """Returns `outcome` without the first `taken` [R] tokens of each row that has any."""
    counts = outcome.counts
    num_left = np.maximum(counts - taken, ZERO)
    # [tokens]: position of each token among those of its row.
    positions = np.arange(len(outcome.token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    token_ids = outcome.token_ids[positions >= np.repeat(taken, counts)]
    return replace(outcome, token_ids=token_ids, token_counts=num_left)


# -- Shortfalls ------------------------------------------------------------------------------------
#
# A step may bring fewer tokens than it was allowed to. Until its result is there, the largest count
# is assumed in the rows' columns, in the tokens promised to sequences that left their rows, and in
# the plans of later steps.


class PromisedTokenRollback:
    """Rolls back promised tokens that an executor did not return.

    `in_flight`: the steps after the one that is answered.
    """

    def __init__(self, placement: Placement, in_flight: deque[StepPlan]) -> None:
        self._placement = placement
        self._in_flight = in_flight

    def settle(self, work: RowWork, counts: Int32Array, taken: Int32Array | None) -> None:
        """Takes back tokens that did not come: rows have got `counts` [R] tokens.

        `taken`: [R], tokens that were taken from parts; None for none. Ignores rows without any
        token, which are handled elsewhere.
        """
        num_more = work.num_more_tokens
        assert num_more is not None
        rows, has_tokens = self._placement.rows, counts > 0
        missing = num_more + 1 - counts
        is_there = (rows.stay_ids[work.row_ids] == work.stay_ids) & has_tokens
        num_unsure = num_more if taken is None else num_more - np.maximum(taken - ONE, ZERO)
        rows.settle(work.row_ids[is_there], num_unsure[is_there], missing[is_there])
        is_short = has_tokens & (missing > 0)
        if not np.count_nonzero(is_short):
            return
        stays = work.stay_ids[is_short].tolist()
        missing_of = dict(zip(stays, missing[is_short].tolist(), strict=True))
        for plan in self._in_flight:
            self._move_back(plan.work, missing_of)
        for stay_id, sequence in self._placement.departures.sequences.items():
            num_missing = missing_of.get(stay_id, 0)
            sequence.num_promised -= num_missing
            if sequence.status is SequenceStatus.SWAPPED:
                sequence.num_computed -= num_missing

    def _move_back(self, work: RowWork, missing_of: dict[int, int]) -> None:
        """Makes the rows of a plan in flight begin at earlier positions. Mutates `work`."""
        each = enumerate(work.stay_ids.tolist())
        found = [(index, missing_of[stay]) for index, stay in each if stay in missing_of]
        if found:
            indexes, missing = np.array(found, np.int64).T
            work.num_computed_tokens[indexes] -= missing.astype(np.int32)
