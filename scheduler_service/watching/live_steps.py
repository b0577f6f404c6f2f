"""Latest steps of one executor: the rows in them, and what came of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scheduler_service.scheduler.engine.row_columns import NO_STAY, RowColumns
from scheduler_service.scheduler.values.plan import (
    BlockMoves,
    NewRow,
    RowWork,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from scheduler_service.scheduler.values.request import Int32Array, Int64Array, Request, Sequence
from scheduler_service.watching.live_names import Names
from splitserve.scheduler.v1 import live_pb2 as live


class RowOwners:
    """Requests that have the rows of an engine, or had them last. `rows`: those of the engine.

    `now`: [2, rows], of each row the number of its request and the length of the prompt. Such an
    array is never written to: another one takes its place.
    """

    def __init__(self, rows: RowColumns) -> None:
        self.rows = rows
        self.now: Int64Array = np.zeros((2, rows.max_num_rows), np.int64)
        self._stay_ids: Int64Array = np.full(rows.max_num_rows, NO_STAY, np.int64)

    def take(self, new_rows: Iterable[NewRow]) -> None:
        """Takes note of the rows that are new in a plan: no others have changed hands by it."""
        self._set((row.row_id, row.sequence) for row in new_rows)

    def refresh(self) -> list[Request]:
        """Takes note of the rows as they are now; returns the requests of those that changed."""
        rows = self.rows
        changed = (rows.stay_ids != self._stay_ids).nonzero()[0]
        if len(changed) == 0:
            return []
        self._stay_ids[changed] = rows.stay_ids[changed]
        found: list[tuple[int, Sequence]] = []
        for row_id in changed.tolist():
            sequence = rows.sequences[row_id]
            if sequence is not None:
                found.append((row_id, sequence))
        self._set(found)
        return [sequence.request for _, sequence in found]

    def _set(self, owners: Iterable[tuple[int, Sequence]]) -> None:
        now = self.now.copy()
        for row_id, sequence in owners:
            now[:, row_id] = sequence.request.arrival, sequence.num_prompt_tokens
        self.now = now


# The most steps of a frame, and rows of a step, that are shown.
MAX_STEPS = 32
MAX_ROWS = 128
_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000


class RowKind(IntEnum):
    """Kinds of rows in a step, with the numbers of `LiveStep.kinds`."""

    PREFILL = 1
    DECODE = 2
    DRAFT = 3
    RUN = 4


_PREFILL, _DECODE = np.uint8(RowKind.PREFILL), np.uint8(RowKind.DECODE)


@dataclass(slots=True)
class LoggedStep:
    """A step that was sent. `number`: position among those that were answered.

    `owners`: `RowOwners.now` when it was planned. `token_ids`: its result, -1 for none. Figures are
    computed when a watcher is told of the step, as there are more steps than frames.
    """

    step_id: int
    sent_ns: int
    work: RowWork
    owners: Int64Array
    moves: BlockMoves
    number: int = 0
    round_trip_ns: int = 0
    compute_us: int = 0
    token_ids: Int32Array | None = None
    is_failed: bool = False

    @property
    def request_numbers(self) -> list[int]:
        """Numbers of the requests of its first rows."""
        found: list[int] = self.owners[0, self.work.row_ids[:MAX_ROWS]].tolist()
        return found

    @property
    def device_blocks(self) -> set[int]:
        """Device blocks that it copies from or to."""
        moves = self.moves
        sources = {source for source, _ in [*moves.swap_out, *moves.copy]}
        return sources | moves.device_destinations

    @property
    def host_blocks(self) -> set[int]:
        """Host blocks that it copies from or to."""
        return self.moves.host_destinations | {source for source, _ in self.moves.swap_in}

    def tell(self, told: live.LiveStep) -> None:
        """Fills `told`, which is blank."""
        work = self.work
        numbers, num_prompt = self.owners[:, work.row_ids[:MAX_ROWS]]
        told.step_id = self.step_id
        told.sent_ms = self.sent_ns // _NS_PER_MS
        told.round_trip_us = self.round_trip_ns // _NS_PER_US
        told.compute_us = self.compute_us
        told.rows.extend(numbers.tolist())
        told.kinds = _kinds(work, num_prompt).tobytes()
        told.num_tokens.extend(work.num_inputs[:MAX_ROWS].tolist())
        told.num_rows = len(work.row_ids)
        if self.token_ids is not None:
            told.num_sampled = int(np.count_nonzero(self.token_ids >= 0))
        if self.moves:
            told.num_swapped_out = len(self.moves.swap_out)
            told.num_swapped_in = len(self.moves.swap_in)
            told.num_copied = len(self.moves.copy)
        told.failed = self.is_failed


class StepLog:
    """Steps of an executor that are in flight, and the latest that were answered."""

    def __init__(self, owners: RowOwners) -> None:
        self.owners = owners
        self.num_answered = 0
        self.in_flight = deque[LoggedStep]()
        self.answered = deque[LoggedStep](maxlen=MAX_STEPS)

    def sent(self, plan: StepPlan, now_ns: int, names: Names) -> None:
        """Takes note of a step that was sent; called in the order in which steps were planned."""
        owners = self.owners
        if plan.new_rows:
            names.see(row.sequence.request for row in plan.new_rows)
            owners.take(plan.new_rows)
        self.in_flight.append(LoggedStep(plan.step_id, now_ns, plan.work, owners.now, plan.moves))

    def took(self, outcome: StepOutcome, now_ns: int) -> None:
        """Takes note of the result of the oldest step in flight, if it was sent after the start."""
        while self.in_flight and self.in_flight[0].step_id <= outcome.step_id:
            step = self.in_flight.popleft()
            if step.step_id < outcome.step_id:
                continue
            self.num_answered += 1
            step.number = self.num_answered
            step.round_trip_ns = now_ns - step.sent_ns
            step.compute_us = outcome.compute_us
            status = outcome.status
            if status is StepStatus.OK:
                step.token_ids = outcome.token_ids
            else:
                step.is_failed = status is not StepStatus.NEED_SNAPSHOT
            self.answered.append(step)


def _kinds(work: RowWork, num_prompt: Int64Array) -> npt.NDArray[np.uint8]:
    """Returns the `RowKind` of each of the first rows, [len(num_prompt)] uint8."""
    num = len(num_prompt)
    is_prompt = (work.num_new_tokens[:num] > 1) | (work.num_computed_tokens[:num] < num_prompt)
    # Nearly all rows are of these two kinds.
    kinds: npt.NDArray[np.uint8] = np.where(is_prompt, _PREFILL, _DECODE)
    if work.num_run_on_tokens is not None:
        kinds[~is_prompt & (work.num_run_on_tokens[:num] > 0)] = RowKind.RUN
    if work.drafts is not None:
        kinds[~is_prompt & (work.drafts.counts[:num] > 0)] = RowKind.DRAFT
    return kinds
