"""A step or a row failed: whatever leaned on KV that it was to write is computed again.

Who loses too often without a new token in between is not computed again, but ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.core.departures import TablePart
from scheduler_service.core.placement import Placement
from scheduler_service.core.plan import StepPlan
from scheduler_service.core.request import FinishReason, Int32Array, Request, RequestStatus

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
