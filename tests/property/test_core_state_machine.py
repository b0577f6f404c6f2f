"""The scheduler core against a fake executor that computes what the block tables say.

The fake executor chains every token to what it reads through the block table, so a wrong table, a
block that is reused too early or a missing recompute changes the tokens. Whatever happens on the
way (arrivals, aborts, failing steps, executor loss, preemption, chunking, pipelining), each
request's tokens must be the ones of `expected_tokens`.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import FinishReason, Request, SequenceStatus
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.core.scheduler import Scheduler
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_rpc.domain_error import DomainError
from tests.support.fake_runner import FakeRunner, expected_tokens
from tests.support.in_process import InProcessEngine, output_token_ids

VOCAB_SIZE = 50
MAX_MODEL_LEN = 60


def held_block_ids(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    """Every block of a block table, and those that wait for a step in flight."""
    tables = [block for r in requests for block in r.sequence.block_table]
    return tables + [block for _, blocks in scheduler._blocks._deferred for block in blocks]


class CoreMachine(RuleBasedStateMachine):
    """Arrivals, steps, failures; the invariants hold after each."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.epoch = 0
        self.num_arrivals = 0

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        num_blocks=st.integers(4, 40),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 2, 7, 64]),
        depth=st.integers(1, 3),
    )
    def start(
        self, block_size: int, num_blocks: int, max_num_seqs: int, budget: int, depth: int
    ) -> None:
        self.config = SchedulerConfig(
            block_size=block_size,
            num_device_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_num_waiting=8,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({0}),
        )
        self.depth = depth
        self.connect()

    def connect(self) -> None:
        """A new executor with an empty cache, and a new core for it."""
        self.epoch += 1
        config = self.config
        self.runner = FakeRunner(
            num_device_blocks=config.num_device_blocks,
            num_host_blocks=0,
            block_size=config.block_size,
            vocab_size=VOCAB_SIZE,
        )
        self.engine = InProcessEngine(config, self.runner, epoch=self.epoch, depth=self.depth)

    @rule(
        prompt=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=30),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
    )
    def arrive(
        self, prompt: list[int], max_tokens: int | None, seed: int, ignore_eos: bool
    ) -> None:
        self.num_arrivals += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        request = Request.create(
            f"r{self.num_arrivals}", prompt, params, arrival=self.num_arrivals, seed=seed
        )
        with suppress(DomainError):  # too large, or the queue is full
            self.engine.scheduler.add(request)
            self.requests.append(request)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.fill()
            if not self.engine.in_flight:
                return
            self.engine.answer()

    @precondition(lambda self: any(not r.is_finished for r in self.requests))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        unfinished = [r for r in self.requests if not r.is_finished]
        request = data.draw(st.sampled_from(unfinished))
        assert self.engine.scheduler.abort(request.request_id) is request

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def step_fails(self) -> None:
        def fail(result: pb.StepResult) -> None:
            if result.status == pb.STEP_STATUS_OK:
                result.sampled_token_ids = result.row_statuses = b""
                result.status = pb.STEP_STATUS_FAILED

        self.engine.answer(fail)

    @precondition(lambda self: self.engine.in_flight)
    @rule(status=st.sampled_from([pb.STEP_STATUS_NEED_SNAPSHOT, pb.STEP_STATUS_REFUSED]))
    def step_is_not_executed(self, status: pb.StepStatus) -> None:
        self.engine.skip(status)

    @rule()
    def executor_is_lost(self) -> None:
        moved = self.engine.scheduler.evacuate()
        self.connect()
        for request in moved:
            if not request.is_finished:
                self.engine.scheduler.readmit(request)

    @invariant()
    def every_block_is_free_or_held_once(self) -> None:
        scheduler = getattr(self, "engine", None) and self.engine.scheduler
        if scheduler is None:
            return
        held = Counter(held_block_ids(scheduler, self.requests))
        assert all(count == 1 for count in held.values())
        assert len(held) + scheduler.num_free_blocks == self.config.num_device_blocks

    @invariant()
    def executor_reads_only_what_was_written(self) -> None:
        assert not hasattr(self, "runner") or self.runner.violations == []

    @invariant()
    def states_agree(self) -> None:
        for request in self.requests:
            sequence = request.sequence
            is_running = sequence.status is SequenceStatus.RUNNING
            assert bool(sequence.block_table) == is_running == (sequence.row_id >= 0)
            assert sequence.is_finished == request.is_finished

    @invariant()
    def tokens_are_the_expected_ones(self) -> None:
        for request in self.requests:
            tokens = output_token_ids(request)
            prompt = request.sequence.token_ids[: request.sequence.num_prompt_tokens]
            assert tokens == expected_tokens(prompt, len(tokens), request.sequence.seed, VOCAB_SIZE)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        assert all(request.is_finished for request in self.requests)
        assert self.engine.scheduler.num_free_blocks == self.config.num_device_blocks
        for request in self.requests:
            self.ends_for_its_reason(request)

    def ends_for_its_reason(self, request: Request) -> None:
        tokens = output_token_ids(request)
        if request.finish_reason is FinishReason.STOP:
            assert tokens[-1] == request.stop_token_id
        if not request.params.ignore_eos:
            assert 0 not in tokens[:-1]
        if request.finish_reason is FinishReason.LENGTH:
            assert len(tokens) == request.params.max_tokens
        if request.finish_reason is FinishReason.MODEL_LENGTH:
            assert len(request.sequence.token_ids) == self.config.max_len


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "150")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
