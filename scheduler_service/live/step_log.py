"""The latest steps of one executor: who was in them, as what, and what came of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
    """A step that was sent. `number`: by which watchers know what they were told of."""

    step_id: int
    sent_ns: int
    requests: Sequence[Request]
    kinds: bytes
    num_tokens: Sequence[int]
    num_rows: int
    moves: BlockMoves
    number: int = 0
    round_trip_ns: int = 0
    compute_us: int = 0
    num_sampled: int = 0
    is_failed: bool = False

    @property
    def request_numbers(self) -> list[int]:
        """Of `requests`, as watchers are told of them."""
        return [request.arrival for request in self.requests]

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
    in_flight: deque[LoggedStep] = field(default_factory=deque)
    answered: deque[LoggedStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))

    def sent(self, plan: StepPlan, rows: RowColumns, now_ns: int) -> LoggedStep:
        """A step is on its way; `rows` are as they were when it was planned."""
        row_ids = plan.work.row_ids[:MAX_ROWS].tolist()
        sequences = [rows.sequence(row_id) for row_id in row_ids]
        num_prompt = np.array([each.num_prompt_tokens for each in sequences], np.int32)
        step = LoggedStep(
            plan.step_id,
            now_ns,
            [sequence.request for sequence in sequences],
            _kinds(plan.work, num_prompt).tobytes(),
            plan.work.num_inputs[:MAX_ROWS].tolist(),
            len(plan.work.row_ids),
            plan.moves,
        )
        self.in_flight.append(step)
        return step

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
                step.num_sampled = int(outcome.counts.sum())
            self.answered.append(step)


def _kinds(work: RowWork, num_prompt: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
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
