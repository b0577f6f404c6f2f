"""Losses: after a failed step or row, everything that depends on KV it was to write is recomputed.

A request that is lost too often without a new token in between ends with an error instead. Also
makes copies of requests that leave the engine, and handles row statuses other than OK.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.step_draft import TablePart
from scheduler_service.scheduler.values import (
    NO_ROW,
    OF_NO_CORE,
    ROW_COMPUTED,
    BeamSearch,
    BoolArray,
    FinishReason,
    Int32Array,
    Int64Array,
    Request,
    RequestStatus,
    RowStatus,
    RowWork,
    Sequence,
    SequenceStatus,
    StepEvents,
    StepOutcome,
    StepPlan,
)

MAX_FRUITLESS_LOSSES = 8


@dataclass(slots=True)
class _Taint:
    """Stays in rows, device blocks and host blocks whose KV is not what it should be."""

    stay_ids: set[int]
    blocks: set[int] = field(default_factory=set)
    host_blocks: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Number of stays and blocks found; constant once all are found."""
        return len(self.stay_ids) + len(self.blocks) + len(self.host_blocks)


class FailureRecovery:
    """Finds the KV that a failure spoils, unpublishes it, and makes its sequences wait again."""

    def __init__(self, placement: Placement, in_flight: deque[StepPlan]) -> None:
        self._placement = placement
        self._in_flight = in_flight

    def fail_step(self, plan: StepPlan, *, is_refused: bool) -> None:
        """Loses a step that was refused or failed as a whole; its requests become suspects."""
        concerned = self.requests_of(plan)
        if is_refused:
            # The reason may be a new row itself, whether or not it was to compute.
            concerned |= {
                row.sequence.request: None
                for row in plan.new_rows
                if row.sequence.row_id == row.row_id
            }
        self.lose_step(plan, is_fruitless=True)
        for request in concerned:
            if request.status is RequestStatus.RUNNING:
                self.lose_request(request)
        self._placement.suspects.step_failed(concerned)

    def survive(self, plan: StepPlan, counts: Int32Array) -> list[Request]:
        """Notes requests that got a token from an executed step; acquits suspects among them.

        `counts`: [R] tokens of each row. Returns acquitted requests that came from quarantine.
        """
        survivors: dict[Request, None] = {}
        for index in np.flatnonzero(counts).tolist():
            row_id, stay_id = int(plan.work.row_ids[index]), int(plan.work.stay_ids[index])
            sequence = self._placement.sequence_of(row_id, stay_id)
            if sequence is not None:
                survivors[sequence.request] = None
        suspects = self._placement.suspects
        return [request for request in survivors if suspects.survive(request)]

    def requests_of(self, plan: StepPlan) -> dict[Request, None]:
        """Returns the requests that a step computes and that its result still concerns."""
        return {request: None for request in self.rows_of(plan) if request is not None}

    def rows_of(self, plan: StepPlan) -> list[Request | None]:
        """Returns the request of each row of a step; None where the sequence has ended or left."""
        work = plan.work
        each = zip(work.row_ids.tolist(), work.stay_ids.tolist(), strict=True)
        sequences = (self._placement.sequence_of(row_id, stay_id) for row_id, stay_id in each)
        return [None if sequence is None else sequence.request for sequence in sequences]

    def lose_step(self, plan: StepPlan, *, is_fruitless: bool) -> None:
        """Discards all KV that `plan` was to write. `is_fruitless`: counts against its requests.

        A request that is lost too often without a new token in between ends with an error.
        """
        taint = _Taint(
            set(plan.work.stay_ids.tolist()),
            plan.moves.device_destinations,
            plan.moves.host_destinations,
        )
        self._spread(plan, taint)
        self._discard(taint, is_fruitless=is_fruitless)

    def lose_rows(self, plan: StepPlan, stay_ids: Iterable[int]) -> None:
        """Discards all KV that these rows were to write in `plan`."""
        taint = _Taint(set(stay_ids))
        self._spread(plan, taint)
        self._discard(taint, is_fruitless=True)

    def lose_request(self, request: Request) -> None:
        """Discards all KV of a request and its results of steps in flight, and counts a loss.

        Ends the request with an error if it was lost too often; otherwise it is recomputed.
        """
        placement = self._placement
        num_tokens = sum(len(placement.known_tokens(sequence)) for sequence in request.sequences)
        if is_lost_too_often(request, num_tokens):
            placement.finish(request, FinishReason.ERROR, loss_error(request))
        else:
            self._recompute(request)

    def _recompute(self, request: Request) -> None:
        # All unfinished sequences: one that has left its row may still get results.
        for sequence in request.unfinished:
            self._placement.drop(sequence)

    def readers_of(self, plan: StepPlan, stay_ids: set[int]) -> set[int]:
        """Returns stays whose rows read, in this very step, KV that `stay_ids` were to write.

        Such a reader, even if it is in `stay_ids`, is not to blame for its failure.
        """
        parts: dict[int, list[TablePart]] = {}
        for part in self._table_parts():
            parts.setdefault(part.stay_id, []).append(part)
        spans = self._spans((plan,))
        readers, spoiled = set[int](), set[int]()
        # A row reads only positions before its own, so the rows that write them come earlier.
        for index in np.argsort(plan.work.num_computed_tokens, kind="stable").tolist():
            stay_id = int(plan.work.stay_ids[index])
            if any(not spoiled.isdisjoint(part.blocks) for part in parts.get(stay_id, ())):
                readers.add(stay_id)
            elif stay_id not in stay_ids:
                continue
            for part in parts.get(stay_id, ()):
                spoiled |= _written(part, spans)
        return readers

    # -- dependencies on lost KV ---------------------------------------------------------------

    def _spread(self, failed: StepPlan, taint: _Taint) -> None:
        """Extends `taint` along block tables, writes and moves until nothing more is found."""
        parts = self._table_parts()
        spans = self._spans((failed, *self._in_flight))
        size = -1
        while taint.size > size:
            size = taint.size
            for part in parts:
                if part.stay_id in taint.stay_ids:
                    if part.encodes:
                        taint.blocks.update(part.cross_blocks)
                    taint.blocks |= _written(part, spans)
                elif not taint.blocks.isdisjoint((*part.blocks, *part.cross_blocks)):
                    taint.stay_ids.add(part.stay_id)
            for moves in (*(plan.moves for plan in self._in_flight), self._placement.draft.moves):
                taint.host_blocks |= {d for s, d in moves.swap_out if s in taint.blocks}
                taint.blocks |= {d for s, d in moves.swap_in if s in taint.host_blocks}
                taint.blocks |= {d for s, d in moves.copy if s in taint.blocks}

    def _table_parts(self) -> list[TablePart]:
        """Returns table parts of all rows, and of departed rows that steps in flight concern."""
        placement = self._placement
        there = [placement.table_part(row_id) for row_id in placement.rows.order.tolist()]
        return there + placement.departures.table_parts

    def _spans(self, plans: Iterable[StepPlan]) -> dict[int, list[tuple[int, int]]]:
        """Returns, by stay, the (first, end) table indexes of blocks that its row may write.

        A row may begin at an earlier position than planned; the plans before it then write there.
        """
        block_size, spans = self._placement.rows.block_size, dict[int, list[tuple[int, int]]]()
        for plan in plans:
            work = plan.work
            first = work.num_computed_tokens // block_size
            end = (work.num_computed_tokens + work.num_written - 1) // block_size + 1
            each = zip(work.stay_ids.tolist(), first.tolist(), end.tolist(), strict=True)
            for stay_id, *span in each:
                spans.setdefault(stay_id, []).append((span[0], span[1]))
        return spans

    def _discard(self, taint: _Taint, *, is_fruitless: bool) -> None:
        for block_id in taint.blocks:
            self._placement.blocks.device.unpublish(block_id)
        for block_id in taint.host_blocks:
            self._placement.blocks.host.unpublish(block_id)
        for request in self._requests_of(taint):
            # Sequences of a request share blocks and copies of blocks, so they are lost together.
            if is_fruitless:
                self.lose_request(request)
            else:
                self._recompute(request)

    def _requests_of(self, taint: _Taint) -> list[Request]:
        placement = self._placement
        found: dict[Request, None] = {}
        for sequence in placement.rows.running:
            if int(placement.rows.stay_ids[sequence.row_id]) in taint.stay_ids:
                found[sequence.request] = None
        for stay_id, sequence in placement.departures.sequences.items():
            if stay_id in taint.stay_ids:
                found[sequence.request] = None
        for request in placement.swapped:
            tables = [sequence.host_table for sequence in request.sequences]
            if any(
                not taint.host_blocks.isdisjoint(table)
                for table in (*tables, request.host_cross_blocks)
            ):
                found[request] = None
        return list(found)


def _written(part: TablePart, spans: dict[int, list[tuple[int, int]]]) -> set[int]:
    """Returns the blocks of a table part that its row writes. `spans`: see `_spans` above."""
    written: set[int] = set()
    for first, end in spans.get(part.stay_id, ()):
        start = max(first - part.first_index, 0)
        written.update(part.blocks[start : max(end - part.first_index, 0)])
    return written


def is_lost_too_often(request: Request, num_tokens: int) -> bool:
    """Counts a loss of a request with `num_tokens`; returns whether the limit is reached.

    A new token since the previous loss resets the count.
    """
    if num_tokens != request.num_tokens_at_loss:
        request.num_tokens_at_loss, request.num_fruitless_losses = num_tokens, 0
    request.num_fruitless_losses += 1
    return request.num_fruitless_losses >= MAX_FRUITLESS_LOSSES


def loss_error(request: Request) -> tuple[str, str]:
    """Returns the error (reason, message) of a request that was lost too often."""
    message = f"lost {request.num_fruitless_losses} times in a row without a new token"
    return "EXECUTOR_LOST_REPEATEDLY", message


# -- Requests that leave the engine ----------------------------------------------------------------


def evacuate(placement: Placement, in_flight: Collection[str]) -> list[Request]:
    """Returns copies of all requests, to be run by another engine.

    `in_flight`: ids of requests that steps without a result were to compute.
    """
    moved = []
    for request in placement.requests.values():
        moved.append(detach(request, placement))
        moved[-1].was_in_flight = request.request_id in in_flight
    return moved


def take_back(
    placement: Placement, plan: StepPlan, events: StepEvents, num_reported: Int32Array | None = None
) -> None:
    """Removes the tokens of a result, or of a part of it, from unfinished requests.

    Called before `evacuate`, after an error in the middle of applying the result of `plan`.

    `events`: what would have been reported. `num_reported`: [R], tokens of each row that earlier
    parts reported, which stay; None for none. Restores nothing else in the placement. Beams stay as
    they are, and so do the scores of completions that had tokens before.
    """
    for request, scored in events.prompt_logprobs:
        request.num_prompt_logprobs_sent -= len(scored)
    work, rows = plan.work, placement.rows
    samples = np.ones(len(work.row_ids), np.bool_) if work.samples is None else work.samples
    # A row that samples has computed all its known tokens.
    lengths = work.num_computed_tokens + work.num_new_tokens
    if num_reported is not None:
        lengths += num_reported
    for index in np.flatnonzero(samples).tolist():
        row_id, length = int(work.row_ids[index]), int(lengths[index])
        sequence = placement.sequence_of(row_id, int(work.stay_ids[index]))
        if sequence is None or sequence.is_finished or sequence.request.params.beam is not None:
            continue
        if sequence.status is SequenceStatus.RUNNING:
            rows.num_known[sequence.row_id] = min(rows.num_known[sequence.row_id], length)
        else:
            sequence.token_ids = sequence.token_ids[:length]
        if length == sequence.num_prompt_tokens:
            # Scores choose the best completions, so those of tokens taken back must not count.
            sequence.cumulative_logprob, sequence.scored = 0.0, []


def detach(request: Request, placement: Placement) -> Request:
    """Returns a copy of a request that another placement may take, without shared state."""
    moved = replace(
        request,
        status=RequestStatus.ABSENT,
        params_set=OF_NO_CORE,
        prepared_for=None,
        is_encoded=False,
        encoded_in_step=0,
        encoder_hashes=[],
        cross_blocks=[],
        host_cross_blocks=[],
        completions=list(request.completions),
        search=request.search and BeamSearch.from_state(request.search.state),
    )
    moved.sequences = [
        _detach_sequence(sequence, moved, placement) for sequence in request.sequences
    ]
    return moved


def _detach_sequence(sequence: Sequence, moved: Request, placement: Placement) -> Sequence:
    """Returns a copy of a sequence for `moved`, without blocks and steps of `placement`."""
    status = SequenceStatus.FINISHED if sequence.is_finished else SequenceStatus.WAITING
    return replace(
        sequence,
        request=moved,
        token_ids=placement.known_tokens(sequence).copy(),
        status=status,
        row_id=NO_ROW,
        num_promised=0,
        settles_at_step=0,
        num_computed=0,
        host_table=[],
        block_hashes=[],
        chains={},
        candidates=None,
        scored=list(sequence.scored),
    )


# -- Rows that are not OK --------------------------------------------------------------------------

# Longest time for which a row is repeated to get its first token.
MAX_UNSAMPLED_NS = 60 * 10**9
_NOT_COMPILED = f"the executor did not compile the grammar within {MAX_UNSAMPLED_NS // 10**9} s"
_REASONS = {
    RowStatus.INVALID_LOGITS: "INVALID_LOGITS",
    RowStatus.FAILED: "ROW_FAILED",
    RowStatus.GRAMMAR_INVALID: "GRAMMAR_INVALID",
}


class RowFailures:
    """Ends requests of failed rows, and repeats rows whose grammar is being compiled."""

    def __init__(self, placement: Placement, losses: FailureRecovery) -> None:
        self._placement = placement
        self._losses = losses

    def take(self, plan: StepPlan, outcome: StepOutcome, statuses: Int64Array) -> BoolArray | None:
        """Applies `statuses` [R]; sequences that depend on failed rows are recomputed.

        Returns [R] bool: rows that were to sample and did, or failed; None for all rows.
        """
        for index in np.flatnonzero(statuses == RowStatus.GRAMMAR_INVALID).tolist():
            self._end(plan, outcome, index, RowStatus.GRAMMAR_INVALID)
        self._take_unwritten(plan, outcome, statuses)
        return self._take_unsampled(plan.work, statuses)

    def _take_unwritten(self, plan: StepPlan, outcome: StepOutcome, statuses: Int64Array) -> None:
        """Loses rows that may not have written their KV; ends the requests that are to blame."""
        spoiled = {
            int(plan.work.stay_ids[index]): index
            for index, status in enumerate(statuses.tolist())
            if status not in ROW_COMPUTED and not self._is_over(plan.work, index, status)
        }
        if not spoiled:
            return
        # A row that read KV which another row failed to write is not to blame for its failure.
        readers = self._losses.readers_of(plan, set(spoiled)) if len(spoiled) > 1 else set()
        for stay_id, index in spoiled.items():
            status = RowStatus(int(statuses[index]))
            if stay_id not in readers and status is not RowStatus.INPUT_UNAVAILABLE:
                self._end(plan, outcome, index, status)
        self._losses.lose_rows(plan, spoiled)

    def _is_over(self, work: RowWork, index: int, status: int) -> bool:
        """Returns whether a row has no input because its sequence has ended or was lost.

        No row reads what such a row was to write: it lies behind all known tokens of the sequence.
        """
        is_without_input = status == RowStatus.INPUT_UNAVAILABLE
        return is_without_input and self._sequence_of(work, index) is None

    def _take_unsampled(self, work: RowWork, statuses: Int64Array) -> BoolArray | None:
        """Makes rows that were not sampled compute their last token once more.

        Returns [R] bool, the sampling rows without these; None for all rows. Ends requests that
        have waited longer than MAX_UNSAMPLED_NS.
        """
        is_repeated: BoolArray = statuses == RowStatus.NOT_SAMPLED
        indexes = np.flatnonzero(is_repeated).tolist()
        if not indexes:
            return work.samples
        for index in indexes:
            sequence = self._sequence_of(work, index)
            if sequence is None:
                continue
            if sequence.status is SequenceStatus.RUNNING:
                now_ns = self._placement.now_ns
                if self._placement.rows.repeat_last(sequence.row_id, now_ns) > MAX_UNSAMPLED_NS:
                    error = ("ROW_FAILED", _NOT_COMPILED)
                    self._placement.finish(sequence.request, FinishReason.ERROR, error)
            elif sequence.status is SequenceStatus.SWAPPED:
                sequence.num_computed -= 1
        return ~is_repeated if work.samples is None else work.samples & ~is_repeated

    def _end(self, plan: StepPlan, outcome: StepOutcome, index: int, status: RowStatus) -> None:
        """Ends the request of a row with an error, if its sequence is still there."""
        sequence = self._sequence_of(plan.work, index)
        if sequence is not None:
            message = outcome.row_errors.get(index, "the executor could not compute the request")
            error = (_REASONS[status], message)
            self._placement.finish(sequence.request, FinishReason.ERROR, error)

    def _sequence_of(self, work: RowWork, index: int) -> Sequence | None:
        return self._placement.sequence_of(int(work.row_ids[index]), int(work.stay_ids[index]))
