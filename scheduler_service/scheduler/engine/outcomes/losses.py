"""A step or a row failed: whatever leaned on KV that it was to write is computed again.

Who loses too often without a new token in between is not computed again, but ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.step_draft import TablePart
from scheduler_service.scheduler.values.beam_search import BeamSearch
from scheduler_service.scheduler.values.plan import (
    ROW_COMPUTED,
    RowStatus,
    RowWork,
    StepEvents,
    StepOutcome,
    StepPlan,
)
from scheduler_service.scheduler.values.request import (
    NO_ROW,
    OF_NO_CORE,
    BoolArray,
    FinishReason,
    Int32Array,
    Int64Array,
    Request,
    RequestStatus,
    Sequence,
    SequenceStatus,
)

MAX_FRUITLESS_LOSSES = 8


@dataclass(slots=True)
class _Taint:
    """What is not what it was said to be: stays in rows, device blocks, host blocks."""

    stay_ids: set[int]
    blocks: set[int] = field(default_factory=set)
    host_blocks: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Grows until everything is found."""
        return len(self.stay_ids) + len(self.blocks) + len(self.host_blocks)


class Losses:
    """Finds what a failure spoils, unpublishes it, and sends its sequences back to wait."""

    def __init__(self, placement: Placement, in_flight: deque[StepPlan]) -> None:
        self._placement = placement
        self._in_flight = in_flight

    def fail_step(self, plan: StepPlan, *, is_refused: bool) -> None:
        """`plan` was refused or failed as a whole: its requests are suspects from now on."""
        concerned = self.requests_of(plan)
        if is_refused:
            # It may be for what they are, whether or not they were to compute.
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
        """Suspects that get a token from a step that had them did it no harm.

        Returns those from quarantine that are acquitted by it.
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
        """Requests that were to compute in a step, and that its result still concerns."""
        return {request: None for request in self.rows_of(plan) if request is not None}

    def rows_of(self, plan: StepPlan) -> list[Request | None]:
        """Requests of a step, by row; None where the sequence has ended or left the row."""
        work = plan.work
        each = zip(work.row_ids.tolist(), work.stay_ids.tolist(), strict=True)
        sequences = (self._placement.sequence_of(row_id, stay_id) for row_id, stay_id in each)
        return [None if sequence is None else sequence.request for sequence in sequences]

    def lose_step(self, plan: StepPlan, *, is_fruitless: bool) -> None:
        """Nothing that `plan` was to write is there. `is_fruitless`: counts against its requests.

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
        """Nothing that these rows were to write in `plan` is there."""
        taint = _Taint(set(stay_ids))
        self._spread(plan, taint)
        self._discard(taint, is_fruitless=True)

    def lose_request(self, request: Request) -> None:
        """All KV of a request is gone, and what steps in flight promise it."""
        placement = self._placement
        num_tokens = sum(len(placement.known_tokens(sequence)) for sequence in request.sequences)
        if is_lost_too_often(request, num_tokens):
            placement.finish(request, FinishReason.ERROR, loss_error(request))
        else:
            self._recompute(request)

    def _recompute(self, request: Request) -> None:
        # All of them, wherever they are: also who has left its row may still get results.
        for sequence in request.unfinished:
            self._placement.drop(sequence)

    def readers_of(self, plan: StepPlan, stay_ids: set[int]) -> set[int]:
        """Rows of `plan` that read in this very step what rows `stay_ids` of it were to write.

        Where one of them has read of another, it is not to blame for what became of it.
        """
        parts: dict[int, list[TablePart]] = {}
        for part in self._table_parts():
            parts.setdefault(part.stay_id, []).append(part)
        spans = self._spans((plan,))
        readers, spoiled = set[int](), set[int]()
        # A row reads what lies before its own positions: whoever writes it comes earlier.
        for index in np.argsort(plan.work.num_computed_tokens, kind="stable").tolist():
            stay_id = int(plan.work.stay_ids[index])
            if any(not spoiled.isdisjoint(part.blocks) for part in parts.get(stay_id, ())):
                readers.add(stay_id)
            elif stay_id not in stay_ids:
                continue
            for part in parts.get(stay_id, ()):
                spoiled |= _written(part, spans)
        return readers

    # -- who leans on what ---------------------------------------------------------------------

    def _spread(self, failed: StepPlan, taint: _Taint) -> None:
        """Follows what rows have and write, and moves, until nothing more is found."""
        parts = self._table_parts()
        spans = self._spans((failed, *self._in_flight))
        size = -1
        while taint.size > size:
            size = taint.size
            for part in parts:
                if part.stay_id in taint.stay_ids:
                    taint.blocks.update(part.cross_blocks)
                    taint.blocks |= _written(part, spans)
                elif not taint.blocks.isdisjoint((*part.blocks, *part.cross_blocks)):
                    taint.stay_ids.add(part.stay_id)
            for moves in (*(plan.moves for plan in self._in_flight), self._placement.draft.moves):
                taint.host_blocks |= {d for s, d in moves.swap_out if s in taint.blocks}
                taint.blocks |= {d for s, d in moves.swap_in if s in taint.host_blocks}
                taint.blocks |= {d for s, d in moves.copy if s in taint.blocks}

    def _table_parts(self) -> list[TablePart]:
        """What rows have that are there, and what those had that steps in flight still concern."""
        placement = self._placement
        there = [placement.table_part(row_id) for row_id in placement.rows.order.tolist()]
        return there + placement.departures.table_parts

    def _spans(self, plans: Iterable[StepPlan]) -> dict[int, list[tuple[int, int]]]:
        """By stay, the blocks (first and end index in its table) that its rows may write.

        A row may begin before it is thought to, in what the plans before it write.
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
            # Sequences of a request share blocks and copies of blocks: they are lost together.
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
    """The blocks of a table, or of a part of it, that its row writes; `spans` as of `_spans`."""
    written: set[int] = set()
    for first, end in spans.get(part.stay_id, ()):
        start = max(first - part.first_index, 0)
        written.update(part.blocks[start : max(end - part.first_index, 0)])
    return written


def is_lost_too_often(request: Request, num_tokens: int) -> bool:
    """Counts a loss of a request that has `num_tokens`; a new token in between starts anew."""
    if num_tokens != request.num_tokens_at_loss:
        request.num_tokens_at_loss, request.num_fruitless_losses = num_tokens, 0
    request.num_fruitless_losses += 1
    return request.num_fruitless_losses >= MAX_FRUITLESS_LOSSES


def loss_error(request: Request) -> tuple[str, str]:
    """What to tell the owner of a request that was lost too often."""
    message = f"lost {request.num_fruitless_losses} times in a row without a new token"
    return "EXECUTOR_LOST_REPEATEDLY", message


# -- Requests leave: they become what another core can take ----------------------------------------


def evacuate(placement: Placement, in_flight: Collection[str]) -> list[Request]:
    """Copies of all requests; `in_flight`: those that steps without a result were to compute."""
    moved = []
    for request in placement.requests.values():
        moved.append(detach(request, placement))
        moved[-1].was_in_flight = request.request_id in in_flight
    return moved


def take_back(placement: Placement, plan: StepPlan, events: StepEvents) -> None:
    """Makes requests what they were before the result of `plan` came, as far as they go on.

    `events`: what they would have been told. Of use to `evacuate` only: nothing else in the
    placement is put right. Beams stay as they are, and so do the scores of completions that had
    tokens before.
    """
    for request, scored in events.prompt_logprobs:
        request.num_prompt_logprobs_sent -= len(scored)
    work, rows = plan.work, placement.rows
    samples = np.ones(len(work.row_ids), np.bool_) if work.samples is None else work.samples
    # A row that samples had computed all its known tokens.
    lengths = work.num_computed_tokens + work.num_new_tokens
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
            # These are the tokens by which the best completions are chosen.
            sequence.cumulative_logprob, sequence.scored = 0.0, []


def detach(request: Request, placement: Placement) -> Request:
    """A copy of a request that another placement may take; `placement` never gets at it."""
    moved = replace(
        request,
        status=RequestStatus.ABSENT,
        params_set=OF_NO_CORE,
        prepared_for=None,
        is_encoded=False,
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
    """A copy for `moved`. Neither blocks nor steps of `placement` mean a thing elsewhere."""
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


# --------------------------------------------------------------------------------------------------
# What rows of an executed step mean that are not OK: failures, and tokens yet to be sampled.

# So long a row is asked again and again for its first token.
MAX_UNSAMPLED_NS = 60 * 10**9
_NOT_COMPILED = f"the executor has not compiled its grammar in {MAX_UNSAMPLED_NS // 10**9} s"
_REASONS = {
    RowStatus.INVALID_LOGITS: "INVALID_LOGITS",
    RowStatus.FAILED: "ROW_FAILED",
    RowStatus.GRAMMAR_INVALID: "GRAMMAR_INVALID",
}


class RowFailures:
    """Ends the requests of failed rows, and asks again those whose grammar is being compiled."""

    def __init__(self, placement: Placement, losses: Losses) -> None:
        self._placement = placement
        self._losses = losses

    def take(self, plan: StepPlan, outcome: StepOutcome, statuses: Int64Array) -> BoolArray | None:
        """Takes `statuses` [R]; what leaned on failed rows is computed again.

        Returns [R], the rows that were to sample and did, or failed; None for all.
        """
        for index in np.flatnonzero(statuses == RowStatus.GRAMMAR_INVALID).tolist():
            self._end(plan, outcome, index, RowStatus.GRAMMAR_INVALID)
        self._take_unwritten(plan, outcome, statuses)
        return self._take_unsampled(plan.work, statuses)

    def _take_unwritten(self, plan: StepPlan, outcome: StepOutcome, statuses: Int64Array) -> None:
        """Rows of which nobody knows what they have written."""
        spoiled = {
            int(plan.work.stay_ids[index]): index
            for index, status in enumerate(statuses.tolist())
            if status not in ROW_COMPUTED and not self._is_over(plan.work, index, status)
        }
        if not spoiled:
            return
        # Whoever read what another row failed to write is not to blame for what it made of it.
        readers = self._losses.readers_of(plan, set(spoiled)) if len(spoiled) > 1 else set()
        for stay_id, index in spoiled.items():
            status = RowStatus(int(statuses[index]))
            if stay_id not in readers and status is not RowStatus.INPUT_UNAVAILABLE:
                self._end(plan, outcome, index, status)
        self._losses.lose_rows(plan, spoiled)

    def _is_over(self, work: RowWork, index: int, status: int) -> bool:
        """Whether a row has no input as its sequence has ended, or was lost with what it leans on.

        Nobody reads what it was to write: it lies behind all that is known of the sequence.
        """
        is_without_input = status == RowStatus.INPUT_UNAVAILABLE
        return is_without_input and self._sequence_of(work, index) is None

    def _take_unsampled(self, work: RowWork, statuses: Int64Array) -> BoolArray | None:
        """Rows that compute their last token once more, for a token."""
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
        """Ends the request of a row, if it is still there."""
        sequence = self._sequence_of(plan.work, index)
        if sequence is not None:
            message = outcome.row_errors.get(index, "the executor could not compute it")
            error = (_REASONS[status], message)
            self._placement.finish(sequence.request, FinishReason.ERROR, error)

    def _sequence_of(self, work: RowWork, index: int) -> Sequence | None:
        return self._placement.sequence_of(int(work.row_ids[index]), int(work.stay_ids[index]))
