"""A core that was written down and read back goes on exactly as the one it was."""

from __future__ import annotations

import os
from contextlib import suppress
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.values import (
    SchedulerConfig,
    StepEvents,
    StepOutcome,
    StepPart,
    StepPlan,
)
from scheduler_service.step_codec import encode_plan
from splitserve_contract import DomainError
from tests.property.core_workloads import configs, fit, random_spec
from tests.support.core.driver import EngineWithQueue
from tests.support.core.engine import CoreEngine
from tests.support.core.plan_executor import PlanExecutor
from tests.support.fakes.expected_outputs import Oracle, create_request
from tests.support.fakes.fake_runner import FakeRunner


class Twins:
    """Two cores as one: both are told everything, and must do the same."""

    def __init__(self, cores: list[EngineWithQueue]) -> None:
        self.cores = cores

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.cores[0], name)

    def schedule(self) -> StepPlan | None:
        plans = [core.schedule() for core in self.cores]
        messages = [
            plan and encode_plan(plan, scheduler_epoch=1, executor_epoch=1) for plan in plans
        ]
        assert messages[0] == messages[1]
        return plans[0]

    def apply(self, outcome: StepOutcome) -> StepEvents:
        return self._only([core.apply(outcome) for core in self.cores])

    def take_part(self, part: StepPart) -> StepEvents:
        return self._only([core.take_part(part) for core in self.cores])

    def take_ended(self) -> StepEvents:
        return self._only([core.take_ended() for core in self.cores])

    def tick(self, now_ns: int) -> None:
        for core in self.cores:
            core.tick(now_ns)

    def _only(self, events: list[StepEvents]) -> StepEvents:
        assert describe(events[0]) == describe(events[1])
        return events[0]


def describe(events: StepEvents) -> list[object]:
    """Events without the identity of requests."""
    return [
        events.client_keys.tolist(),
        events.token_ids.tolist(),
        [(e.sequence.request.request_id, e.sequence.index, e.token_id) for e in events.tokens],
        [(request.request_id, scored) for request, scored in events.prompt_logprobs],
        [(s.request.request_id, s.index, s.finish_reason) for s in events.finished_sequences],
        [(r.request_id, r.finish_reason, r.error, r.completions) for r in events.finished],
    ]


def tokens_of(core: EngineWithQueue) -> list[list[int]]:
    """All known tokens of each sequence."""
    placement = core.placement
    sequences = (s for request in placement.requests.values() for s in request.sequences)
    return [placement.known_tokens(sequence).tolist() for sequence in sequences]


@settings(
    max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "12")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    config=configs(),
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    num_steps=st.integers(0, 40),
    num_words=st.sampled_from([None, 1, 2, 3]),
)
def test_core_goes_on_identically_when_it_was_restored(
    config: SchedulerConfig,
    seed: int,
    depth: int,
    num_steps: int,
    num_words: int | None,
) -> None:
    runner = FakeRunner(
        block_size=config.block_size,
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=config.num_host_blocks,
        vocab_size=config.vocab_size,
        sliding_window_tokens=config.sliding_window,
        # Whoever repeats himself is guessed for, where a pass takes the same for more tokens.
        us_per_token=10 if num_words is None else 0,
    )
    runner.num_words = num_words
    engine = CoreEngine(config, runner, PlanExecutor, depth=depth)
    oracle, rng = Oracle(config, num_words), Random(seed)
    for arrival in range(1, 13):
        spec = fit(random_spec(rng), config, engine.now_ns)
        with suppress(DomainError):
            engine.scheduler.check(create_request(spec, arrival))
            engine.add(oracle.make_request(spec, arrival)[0])
    for _ in range(num_steps):
        engine.step()
    engine.fill()
    core = engine.scheduler
    restored = core.restored()
    assert tokens_of(restored) == tokens_of(core)
    engine.scheduler = Twins([core, restored])  # type: ignore[assignment]
    while engine.step():
        pass
    assert all(delivery.is_finished for delivery in engine.deliveries.values())
