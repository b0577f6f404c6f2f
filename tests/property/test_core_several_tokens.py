"""Steps that bring several tokens a row, and what may happen while nobody knows how many.

`CoreMachine` draws everything that there is, and these situations now and then. Here every story
has several of them: rows that run on or have drafts, of which the executor keeps some, while they
are swapped, their executor is lost, or the core breaks when it has taken a result. Sequences are
long, and some come with all tokens but one.
"""

from __future__ import annotations

import os
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.values import (
    Feature,
    PreemptionMode,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    Speculation,
)
from tests.property.core_machine import CoreMachine
from tests.property.core_workloads import EOS, VOCAB_SIZE
from tests.support.fakes.expected_outputs import Spec

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25"))
_MAX_TOKENS = 80
_MAX_PROMPT = 12
_NUM_EVENTS = 30
# Most steps that are answered until one may report a part of its result.
_NUM_STEPS_TO_PART = 6


class _Story(CoreMachine):
    """`happen` is one event, drawn so that rows mostly get several tokens in peace."""

    def begin(self, random: Random) -> None:
        """A core for a few rows, whose blocks suffice for them, or nearly."""
        self.num_words = random.choice([None, None, 1, 2])
        block_size = random.choice([1, 2, 4])
        num_blocks = random.choice([96, 160, 240]) // block_size
        config = SchedulerConfig(
            block_size=block_size,
            num_device_blocks=num_blocks,
            num_host_blocks=2 * num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=random.choice([64, 16, 8]),
            max_model_len=_MAX_PROMPT + _MAX_TOKENS,
            max_num_waiting=16,
            eos_token_ids=frozenset({EOS}),
            vocab_size=VOCAB_SIZE,
            features=frozenset(Feature) - random.choice([set(), {Feature.PARTIAL_RESULTS}]),
            sliding_window=random.choice([None, 3, 8]),
            max_run_ahead=random.choice([3, 5, 8]),
            max_run_ahead_ms=1000,
            speculation=Speculation.PROMPT_LOOKUP if self.num_words else Speculation.OFF,
            preemption_mode=random.choice([PreemptionMode.SWAP, PreemptionMode.AUTO]),
            queue_policy=random.choice(["fair", "fcfs"]),
        )
        # With drafts, a pass takes the same for one token and for many.
        self.start(config, random.choice([2, 3]), (0, 0 if self.num_words else 1))

    def arrive_plainly(self, random: Random) -> None:
        """A request with nothing about it that keeps rows from getting several tokens."""
        prompt = random.choices(range(1, VOCAB_SIZE), k=random.randint(1, _MAX_PROMPT))
        num_sequences = random.choice([1, 1, 2])
        params = SamplingParams(
            n=num_sequences,
            max_tokens=_MAX_TOKENS,
            ignore_eos=True,
            stop_token_ids=frozenset(random.choice([(), (), (7, 9)])),
        )
        scheduling = SchedulingParams(tenant=random.choice(["", "heavy", "light"]))
        seed, num_resumed = random.randint(0, 3), random.choice([0, 0, 0, _MAX_TOKENS - 1])
        self.add(Spec(tuple(prompt), params, scheduling, seed, num_resumed=num_resumed))

    def reach_part(self) -> None:
        """Answers steps until one may report a part of its result."""
        for _ in range(_NUM_STEPS_TO_PART):
            if self.running.may_report or not self.running.in_flight:
                return
            self.running.answer()
            self.running.fill()

    def happen(self, random: Random) -> None:
        """A few steps, and then something else; before it some steps report parts."""
        for _ in range(random.randint(1, 5)):
            self.running.step()
            self.check()
        self.running.fill()
        for _ in range(random.randrange(4)):
            self.reach_part()
            self.part_comes(random.randrange(10))
            self.check()
        if not self.running.in_flight or not self.unfinished:
            return
        event = random.choice(
            [
                self.result_contradicts_its_parts,
                self.part_breaks_contract,
                self.result_contradicts_its_parts,
                random.choice([self.client_leaves, self.step_fails, self.step_is_not_executed]),
                self.request_yields_during_its_run,
                self.request_yields_during_its_run,
                self.core_breaks,
                self.executor_is_lost,
                self.row_fails,
                self.request_is_withdrawn,
            ]
        )
        event(random.randrange(10))
        self.check()

    def check(self) -> None:
        """The invariants."""
        self.core_is_consistent()
        self.clients_get_what_is_true()


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_streams_are_true_when_nobody_knows_how_many_tokens_a_step_brings(seed: int) -> None:
    random, story = Random(seed), _Story()
    story.begin(random)
    for _ in range(random.randint(1, 4)):
        story.arrive_plainly(random)
    for _ in range(_NUM_EVENTS):
        if not story.unfinished:
            break
        story.happen(random)
    story.teardown()
