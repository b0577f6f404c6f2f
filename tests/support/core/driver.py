"""Drives a scheduler core by hand: plans go in flight, and outcomes are made up by the test."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import (
    PreemptionCause,
    RowStatus,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from scheduler_service.scheduler.values.request import DEFAULT_SCHEDULING, Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from tests.support.core.engine_with_queue import EngineWithQueue

VOCAB_SIZE = 100
EOS = 99


def make_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "block_size": 4,
        "num_device_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
        "max_num_waiting": 16,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset({EOS}),
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def names(rows: list[tuple[str, int, int]]) -> list[str]:
    """The requests of rows as `CoreDriver` tells of them."""
    return [name for name, _, _ in rows]


class CoreDriver:
    """A scheduler core whose steps are answered with tokens from `sample`."""

    def __init__(self, sample: Callable[[], int] = lambda: 7, **config: object) -> None:
        self.config = make_config(**config)
        self.core = EngineWithQueue(self.config)
        self.sample = sample
        self.in_flight: list[StepPlan] = []
        self.num_requests = 0

    def add(self, prompt: int | list[int], request_id: str = "", **options: Any) -> Request:  # noqa: ANN401
        """Adds a request; see `make_request`."""
        request = self.make_request(prompt, request_id, **options)
        self.core.add(request)
        return request

    def make_request(
        self,
        prompt: int | list[int],
        request_id: str = "",
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        encoder: list[int] | None = None,
        resume: Items[Items[int]] = (),
        **params: object,
    ) -> Request:
        """Returns a request of `prompt`, which is that many tokens, the same for all, or these."""
        self.num_requests += 1
        tokens = [1 + p % 90 for p in range(prompt)] if isinstance(prompt, int) else prompt
        request = Request.create(
            request_id or f"r{self.num_requests}",
            tokens,
            SamplingParams(**params),  # type: ignore[arg-type]
            arrival=self.num_requests,
            seed=0,
            scheduling=scheduling,
            encoder_token_ids=encoder,
            resume_token_ids=resume,
        )
        request.client_key = self.num_requests
        return request

    def preempt(self, request: Request) -> None:
        """A running request has to yield, for no reason that the core has itself."""
        self.core.placement.preempt(request, PreemptionCause.BLOCKS)

    def plan(self) -> StepPlan | None:
        """The next step. If it is to ask again for tokens, alone, that is done at its time."""
        plan = self.core.schedule()
        if self.core.ask_again_at_ns is not None and not self.in_flight:
            self.core.tick(self.core.ask_again_at_ns)
            plan = self.core.schedule()
        if plan is not None:
            self.in_flight.append(plan)
        return plan

    def answer(
        self,
        status: StepStatus = StepStatus.OK,
        row_statuses: list[RowStatus] | None = None,
        token_ids: list[int] | None = None,
        compute_us: int = 0,
        move_us: int = 0,
        runs: list[list[int]] | None = None,
    ) -> StepEvents:
        """Answers the oldest step in flight. `runs`: the tokens of each row, one or several."""
        plan = self.in_flight.pop(0)
        if runs is not None:
            token_ids = [token_id for run in runs for token_id in run]
        if token_ids is None:
            samples = plan.work.samples
            sampled = [True] * len(plan.work.row_ids) if samples is None else samples
            token_ids = [self.sample() if is_sampled else -1 for is_sampled in sampled]
        columns = np.array(token_ids, np.int32)
        outcome = StepOutcome(
            plan.step_id,
            status,
            columns,
            row_statuses,
            move_us=move_us,
            compute_us=compute_us,
            token_counts=None if runs is None else np.array(list(map(len, runs)), np.int32),
        )
        return self.core.apply(outcome)

    def step(self) -> tuple[StepPlan, StepEvents]:
        plan = self.plan()
        assert plan is not None
        return plan, self.answer()

    def next_rows(self) -> list[tuple[str, int, int]]:
        """Plans a step; see `rows_of`."""
        plan = self.plan()
        assert plan is not None
        return self.rows_of(plan)

    def run(self, depth: int = 1, max_steps: int = 10_000) -> int:
        """Runs until nothing is left; returns the number of steps."""
        for num_steps in range(max_steps):
            while len(self.in_flight) < depth and self.plan():
                pass
            if not self.in_flight:
                return num_steps
            self.answer()
        raise AssertionError(f"still running after {max_steps} steps")

    def rows_of(self, plan: StepPlan) -> list[tuple[str, int, int]]:
        """(request id, first position, number of tokens) of each row, if it is still there."""
        work, placement = plan.work, self.core.placement
        each = zip(
            work.row_ids.tolist(),
            work.stay_ids.tolist(),
            work.num_computed_tokens.tolist(),
            work.num_new_tokens.tolist(),
            strict=True,
        )
        rows = []
        for row_id, stay_id, start, count in each:
            sequence = placement.sequence_of(row_id, stay_id)
            if sequence is not None:
                rows.append((sequence.request.request_id, start, count))
        return rows
