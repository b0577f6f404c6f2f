"""Latest steps of one executor for the live view: their rows, owners, results and durations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scheduler_service.scheduler.engine import NO_STAY, RowColumns
from scheduler_service.scheduler.values import (
    BlockMoves,
    Int32Array,
    Int64Array,
    NewRow,
    Request,
    RowWork,
    Sequence,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from scheduler_service.watching.live_names import Names
from splitserve.scheduler.v1 import live_pb2 as live


class RowOwners:
    """Requests that own the rows of an engine, or owned them last. `rows`: columns of the engine.

    `now`: [2, max_num_rows] int64, for each row the number of its request and the length of the
    prompt. The array is never written to; a changed copy replaces it.
    """

    def __init__(self, rows: RowColumns) -> None:
        self.rows = rows
        self.now: Int64Array = np.zeros((2, rows.max_num_rows), np.int64)
        self._stay_ids: Int64Array = np.full(rows.max_num_rows, NO_STAY, np.int64)

    def take(self, new_rows: Iterable[NewRow]) -> None:
        """Notes the new rows of a plan. No other rows change owners by the plan."""
        self._set((row.row_id, row.sequence) for row in new_rows)

    def refresh(self) -> list[Request]:
        """Notes the present owners of all rows; returns the requests of the rows that changed."""
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


# Maximum number of steps in a frame, and of rows shown of a step.
MAX_STEPS = 32
MAX_ROWS = 128
_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000


class RowKind(IntEnum):
    """Kinds of rows in a step, numbered as in `LiveStep.kinds`."""

    PREFILL = 1
    DECODE = 2
    DRAFT = 3
    RUN = 4


_PREFILL, _DECODE = np.uint8(RowKind.PREFILL), np.uint8(RowKind.DECODE)


@dataclass(slots=True)
class LoggedStep:
    """Step that was sent. `number`: position among the answered steps, 0 before the answer.

    `owners`: `RowOwners.now` at the time of planning. `token_ids`: result, -1 for rows without a
    token. Figures are computed when the step is sent to a watcher, since there are more steps than
    frames.
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
        """Numbers of the requests of the first MAX_ROWS rows."""
        found: list[int] = self.owners[0, self.work.row_ids[:MAX_ROWS]].tolist()
        return found

    @property
    def device_blocks(self) -> set[int]:
        """Device blocks that the step copies from or to."""
        moves = self.moves
        sources = {source for source, _ in [*moves.swap_out, *moves.copy]}
        return sources | moves.device_destinations

    @property
    def host_blocks(self) -> set[int]:
        """Host blocks that the step copies from or to."""
        return self.moves.host_destinations | {source for source, _ in self.moves.swap_in}

    def fill(self, message: live.LiveStep) -> None:
        """Fills the blank message `message`."""
        work = self.work
        numbers, num_prompt = self.owners[:, work.row_ids[:MAX_ROWS]]
        message.step_id = self.step_id
        message.sent_ms = self.sent_ns // _NS_PER_MS
        message.round_trip_us = self.round_trip_ns // _NS_PER_US
        message.compute_us = self.compute_us
        message.rows.extend(numbers.tolist())
        message.kinds = _kinds(work, num_prompt).tobytes()
        message.num_tokens.extend(work.num_inputs[:MAX_ROWS].tolist())
        message.num_rows = len(work.row_ids)
        if self.token_ids is not None:
            message.num_sampled = int(np.count_nonzero(self.token_ids >= 0))
        if self.moves:
            message.num_swapped_out = len(self.moves.swap_out)
            message.num_swapped_in = len(self.moves.swap_in)
            message.num_copied = len(self.moves.copy)
        message.failed = self.is_failed


class StepLog:
    """Log of the steps of one executor: in flight, and the latest MAX_STEPS that were answered."""

    def __init__(self, owners: RowOwners) -> None:
        self.owners = owners
        self.num_answered = 0
        self.in_flight = deque[LoggedStep]()
        self.answered = deque[LoggedStep](maxlen=MAX_STEPS)

    def sent(self, plan: StepPlan, now_ns: int, names: Names) -> None:
        """Logs a step that was sent. Must be called in the order of planning."""
        owners = self.owners
        if plan.new_rows:
            names.see(row.sequence.request for row in plan.new_rows)
            owners.take(plan.new_rows)
        self.in_flight.append(LoggedStep(plan.step_id, now_ns, plan.work, owners.now, plan.moves))

    def took(self, outcome: StepOutcome, now_ns: int) -> None:
        """Logs the result of a step.

        Ignores the result of a step that was sent before the log began.
        """
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
    """Returns the `RowKind` of each of the first rows, [len(num_prompt)] uint8.

    `num_prompt`: prompt lengths of these rows.
    """
    num = len(num_prompt)
    is_prompt = (work.num_new_tokens[:num] > 1) | (work.num_computed_tokens[:num] < num_prompt)
    # Nearly all rows are prefill or decode.
    kinds: npt.NDArray[np.uint8] = np.where(is_prompt, _PREFILL, _DECODE)
    if work.num_run_on_tokens is not None:
        kinds[~is_prompt & (work.num_run_on_tokens[:num] > 0)] = RowKind.RUN
    if work.drafts is not None:
        kinds[~is_prompt & (work.drafts.counts[:num] > 0)] = RowKind.DRAFT
    return kinds
