"""The latest steps of one executor: who was in them, as what, and what came of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scheduler_service.core.plan import BlockMoves, RowWork, StepOutcome, StepPlan, StepStatus
from scheduler_service.core.request import Request
from scheduler_service.core.row_columns import RowColumns

# Steps that a frame tells, and rows of a step.
MAX_STEPS = 32
MAX_ROWS = 128


class RowKind(IntEnum):
    """As `LiveStep.kinds` says it."""

    PREFILL = 1
    DECODE = 2
    DRAFT = 3
    RUN = 4


@dataclass(slots=True)
class LoggedStep:
    """A step that was sent. `number`: by which watchers know what they were told of.

    `owners`: of each row the number of its request and how long the prompt is, [2, rows]; nobody
    writes to it. What can be computed of a step is computed when a watcher is told: there are more
    steps than frames, and one after another they cost less than each between steps of cores.
    """

    step_id: int
    sent_ns: int
    work: RowWork
    owners: npt.NDArray[np.int64]
    moves: BlockMoves
    number: int = 0
    round_trip_ns: int = 0
    compute_us: int = 0
    counts: npt.NDArray[np.int32] | None = None
    is_failed: bool = False

    @property
    def request_numbers(self) -> list[int]:
        """Of the requests of its first rows, as watchers are told of them."""
        found: list[int] = self.owners[0, self.work.row_ids[:MAX_ROWS]].tolist()
        return found

    @property
    def kinds(self) -> bytes:
        """What each of the first rows is."""
        return _kinds(self.work, self.owners[1, self.work.row_ids[:MAX_ROWS]]).tobytes()

    @property
    def num_tokens(self) -> list[int]:
        """How many each of the first rows computes."""
        found: list[int] = self.work.num_inputs[:MAX_ROWS].tolist()
        return found

    @property
    def num_rows(self) -> int:
        """Of all."""
        return len(self.work.row_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that came of it."""
        return 0 if self.counts is None else int(self.counts.sum())

    @property
    def device_blocks(self) -> set[int]:
        """Those that it reads or writes to move what they hold."""
        moves = self.moves
        sources = {source for source, _ in [*moves.swap_out, *moves.copy]}
        return sources | moves.device_destinations

    @property
    def host_blocks(self) -> set[int]:
        """The same of the host pool."""
        return self.moves.host_destinations | {source for source, _ in self.moves.swap_in}


@dataclass(slots=True)
class StepLog:
    """Steps in flight, and the latest that were answered."""

    num_answered: int = 0
    owners: npt.NDArray[np.int64] | None = None
    in_flight: deque[LoggedStep] = field(default_factory=deque)
    answered: deque[LoggedStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))

    def sent(self, plan: StepPlan, rows: RowColumns, now_ns: int) -> list[Request]:
        """A step is on its way; `rows` are as they were when it was planned.

        Returns the requests of rows that were not known.
        """
        # Whoever gets a row is new in a plan, so nobody else has to be looked up.
        new = [(row.row_id, row.sequence) for row in plan.new_rows]
        owners = self.owners
        if owners is None:
            owners = self.owners = np.zeros((2, len(rows.sequences)), np.int64)
            new = [(row_id, each) for row_id, each in enumerate(rows.sequences) if each]
        elif new:
            owners = self.owners = owners.copy()
        for row_id, sequence in new:
            owners[0, row_id] = sequence.request.arrival
            owners[1, row_id] = sequence.num_prompt_tokens
        step = LoggedStep(plan.step_id, now_ns, plan.work, owners, plan.moves)
        self.in_flight.append(step)
        return [sequence.request for _, sequence in new]

    def took(self, outcome: StepOutcome, now_ns: int) -> None:
        """The oldest step in flight is answered; one that nobody saw go is passed over."""
        while self.in_flight and self.in_flight[0].step_id <= outcome.step_id:
            step = self.in_flight.popleft()
            if step.step_id < outcome.step_id:
                continue
            self.num_answered += 1
            step.number = self.num_answered
            step.round_trip_ns = now_ns - step.sent_ns
            step.compute_us = outcome.compute_us
            step.is_failed = outcome.status in (StepStatus.FAILED, StepStatus.REFUSED)
            if outcome.status is StepStatus.OK:
                step.counts = outcome.counts
            self.answered.append(step)


def _kinds(work: RowWork, num_prompt: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """What each of the first rows is, [len(num_prompt)]."""
    num = len(num_prompt)
    kinds = np.full(num, RowKind.DECODE, np.uint8)
    if work.num_run_on_tokens is not None:
        kinds[work.num_run_on_tokens[:num] > 0] = RowKind.RUN
    if work.drafts is not None:
        kinds[work.drafts.counts[:num] > 0] = RowKind.DRAFT
    is_prompt = (work.num_new_tokens[:num] > 1) | (work.num_computed_tokens[:num] < num_prompt)
    kinds[is_prompt] = RowKind.PREFILL
    return kinds
