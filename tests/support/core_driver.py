"""Drives a scheduler core by hand: plans go in flight, and outcomes are made up by the test."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import RowStatus, StepEvents, StepOutcome, StepPlan, StepStatus
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.core.scheduler import Scheduler

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


class CoreDriver:
    """A scheduler core whose steps are answered with tokens from `sample`."""

    def __init__(self, sample: Callable[[], int] = lambda: 7, **config: object) -> None:
        self.core = Scheduler(make_config(**config))
        self.sample = sample
        self.in_flight: list[StepPlan] = []
        self.num_requests = 0

    def add(self, prompt_len: int, request_id: str = "", **params: object) -> Request:
        self.num_requests += 1
        request = Request.create(
            request_id or f"r{self.num_requests}",
            [1 + position % 90 for position in range(prompt_len)],
            SamplingParams(**params),  # type: ignore[arg-type]
            arrival=self.num_requests,
            seed=0,
        )
        self.core.add(request)
        return request

    def plan(self) -> StepPlan | None:
        plan = self.core.schedule()
        if plan is not None:
            self.in_flight.append(plan)
        return plan

    def answer(
        self,
        status: StepStatus = StepStatus.OK,
        row_statuses: list[RowStatus] | None = None,
        token_ids: list[int] | None = None,
    ) -> StepEvents:
        plan = self.in_flight.pop(0)
        if token_ids is None:
            token_ids = [self.sample() if samples else -1 for samples in plan.work.samples]
        return self.core.apply(StepOutcome(plan.step_id, status, token_ids, row_statuses))

    def step(self) -> tuple[StepPlan, StepEvents]:
        plan = self.plan()
        assert plan is not None
        return plan, self.answer()

    def run(self, depth: int = 1, max_steps: int = 10_000) -> int:
        """Runs until nothing is left; returns the number of steps."""
        for num_steps in range(max_steps):
            while len(self.in_flight) < depth and self.plan():
                pass
            if not self.in_flight:
                return num_steps
            self.answer()
        raise AssertionError(f"still running after {max_steps} steps")


def rows_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request id, first position, number of tokens) of each row."""
    each = zip(
        plan.work.sequences, plan.work.num_computed_tokens, plan.work.num_new_tokens, strict=True
    )
    return [(s.request.request_id, int(start), int(count)) for s, start, count in each if s]
