"""The scheduler core, whatever happens to it: see `CoreMachine`. Here are its variants."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from scheduler_service.scheduler.values import SchedulerConfig, Speculation
from tests.property.core_machine import CoreMachine
from tests.property.core_workloads import configs
from tests.support.core.engine import ProtobufLink

# A failure takes long to shrink.
pytestmark = pytest.mark.timeout(3600)


class ProtobufMachine(CoreMachine):
    """The same through real messages, to an executor's own checks of them."""

    link = ProtobufLink


class RunAheadMachine(CoreMachine):
    """Rows get several tokens whenever they can; an executor whose turns take long would not."""

    def adapt(
        self, config: SchedulerConfig, costs: tuple[int, int]
    ) -> tuple[SchedulerConfig, tuple[int, int]]:
        most = max(config.max_run_ahead, 3)
        more = replace(config, max_run_ahead=most, max_run_ahead_ms=1000, max_num_seqs=8)
        return more, (costs[0], 1)


class DraftMachine(CoreMachine):
    """Rows get drafts, right ones and wrong ones, as what is said repeats itself more or less."""

    @initialize(
        config=configs(),
        depth=st.integers(1, 4),
        num_words=st.integers(1, 3),
    )
    def start(self, config: SchedulerConfig, depth: int, num_words: int) -> None:
        self.num_words = num_words
        config = replace(config, speculation=Speculation.PROMPT_LOOKUP)
        # A pass takes the same for one token and for many.
        super().start(config, depth, (0, 0))


# About 7,000 executed steps; `make soak` has millions, others each time.
NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "30"))
machine_settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = machine_settings
TestRunAheadMachine = RunAheadMachine.TestCase
TestRunAheadMachine.settings = settings(machine_settings, max_examples=max(1, NUM_EXAMPLES // 3))
TestProtobufMachine = ProtobufMachine.TestCase
TestProtobufMachine.settings = settings(machine_settings, max_examples=max(1, NUM_EXAMPLES // 5))
TestDraftMachine = DraftMachine.TestCase
TestDraftMachine.settings = settings(machine_settings, max_examples=max(1, NUM_EXAMPLES // 3))
