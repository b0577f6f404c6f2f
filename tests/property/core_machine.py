"""The scheduler core against a fake executor that computes what the block tables say.

The fake executor chains every token to what it reads through the block table, so a wrong table, a
block that is reused too early or a missing recompute changes the tokens. Whatever happens on the
way (arrivals, aborts, failing steps and rows, executor loss, preemption, chunking, pipelining),
each request's tokens must be those that `Oracle` knows without any scheduler.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from executor_service.steps import RowStatus
from scheduler_service.scheduler import ExecutorState, rescue
from scheduler_service.scheduler.engine.outcomes import Results
from scheduler_service.scheduler.values import (
    ContractBroken,
    PreemptionCause,
    Request,
    SchedulerConfig,
    ScoredToken,
    SequenceStatus,
    StepOutcome,
    StepPart,
    StepPlan,
    StepStatus,
)
from splitserve_contract import DomainError
from tests.property.core_workloads import configs, fit, kin_of, random_spec
from tests.support.core.checks import check_core, check_emptied, check_published
from tests.support.core.engine import MAX_ASKED, Client, CoreEngine, Link
from tests.support.core.plan_executor import PlanExecutor
from tests.support.fakes.expected_outputs import Oracle, Spec, create_request
from tests.support.fakes.fake_runner import FakeRunner, StepFault, cut_at_random


class Mishap(Enum):
    """What goes wrong, or happens behind the clients' backs: the method that does it."""

    CLIENT_LEAVES = "client_leaves"
    REQUEST_YIELDS = "request_yields"
    REQUEST_YIELDS_BEFORE_A_LOSS = "request_yields_before_a_loss"
    REQUEST_YIELDS_DURING_ITS_RUN = "request_yields_during_its_run"
    URGENT_REQUEST_COMES = "urgent_request_comes"
    STEP_FAILS = "step_fails"
    STEP_IS_NOT_EXECUTED = "step_is_not_executed"
    ROW_FAILS = "row_fails"
    ROW_FAILS_AND_SPOILS_OTHERS = "row_fails_and_spoils_others"
    ROW_IS_NONSENSE = "row_is_nonsense"
    GRAMMAR_IS_NEVER_COMPILED = "grammar_is_never_compiled"
    RESULT_BREAKS_CONTRACT = "result_breaks_contract"
    EXECUTOR_IS_LOST = "executor_is_lost"
    CORE_BREAKS = "core_breaks"
    REQUEST_IS_WITHDRAWN = "request_is_withdrawn"
    CORE_IS_RESTORED = "core_is_restored"
    PART_COMES = "part_comes"
    RESULT_CONTRADICTS_ITS_PARTS = "result_contradicts_its_parts"
    PART_BREAKS_CONTRACT = "part_breaks_contract"


def mishaps() -> st.SearchStrategy[list[tuple[Mishap, int]]]:
    """Several, each with the number of whom it concerns; or the same one very often."""
    one = st.tuples(st.sampled_from(Mishap), st.integers(0, 9))
    return st.one_of(st.lists(one, min_size=1, max_size=4), one.map(lambda each: [each] * 9))


class CoreMachine(RuleBasedStateMachine):
    """Arrivals, steps, failures; the invariants hold after each."""

    link: type[Link[Any]] = PlanExecutor

    def __init__(self) -> None:
        super().__init__()
        self.num_words: int | None = None
        self.clients: dict[int, Client] = {}
        self.contents: dict[bytes, tuple[int, ...]] = {}
        self.num_arrivals = 0
        self.engine: CoreEngine[Any] | None = None

    @initialize(
        config=configs(),
        depth=st.integers(1, 4),
        costs=st.sampled_from([(0, 0), (1, 100), (100, 1)]),
    )
    def start(self, config: SchedulerConfig, depth: int, costs: tuple[int, int]) -> None:
        self.depth = depth
        self.config, self.costs = self.adapt(config, costs)
        self.oracle = Oracle(self.config, self.num_words)
        self.connect()

    def adapt(
        self, config: SchedulerConfig, costs: tuple[int, int]
    ) -> tuple[SchedulerConfig, tuple[int, int]]:
        """What is tried of all that there may be."""
        return config, costs

    def connect(self) -> None:
        """A new executor with an empty cache, and a new core for it."""
        now_ns = 0 if self.engine is None else self.engine.now_ns
        runner = FakeRunner(
            block_size=self.config.block_size,
            num_device_blocks=self.config.num_device_blocks,
            num_host_blocks=self.config.num_host_blocks,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            sliding_window_tokens=self.config.sliding_window,
            us_per_block=self.costs[0],
            us_per_token=self.costs[1],
        )
        runner.cut = cut_at_random
        runner.num_words = self.num_words
        self.engine = CoreEngine(self.config, runner, self.link, depth=self.depth)
        self.engine.tick(now_ns)

    @property
    def running(self) -> CoreEngine[Any]:
        assert self.engine is not None
        return self.engine

    @property
    def unfinished(self) -> list[Client]:
        return [client for client in self.clients.values() if not client.delivery.is_finished]

    # -- what happens --------------------------------------------------------------------------

    @rule(count=st.integers(1, 6), seed=st.integers(0, 2**32), are_kin=st.booleans())
    def arrive(self, count: int, seed: int, are_kin: bool) -> None:
        specs = [random_spec(Random(seed + index)) for index in range(count)]
        for spec in specs:
            self.add(kin_of(specs[0], spec) if are_kin else spec)

    def add(self, spec: Spec) -> None:
        with suppress(DomainError):  # too large, or the queue is full
            self.admit(fit(spec, self.config, self.running.now_ns))

    def admit(self, spec: Spec) -> None:
        self.num_arrivals += 1
        self.running.scheduler.check(create_request(spec, self.num_arrivals))
        request, truth = self.oracle.make_request(spec, self.num_arrivals)
        delivery = self.running.add(request)
        self.clients[self.num_arrivals] = Client(spec, truth, delivery)
        self.contents |= truth.contents
        note(f"{request.request_id}: {spec}")

    @rule(num_steps=st.integers(1, 25), wait_ns=st.sampled_from([0, 0, 1_000_000, 1_000_000_000]))
    def step(self, num_steps: int, wait_ns: int) -> None:
        self.running.tick(wait_ns)
        for _ in range(num_steps):
            if not self.running.step():
                return

    # -- what goes wrong -----------------------------------------------------------------------

    @precondition(lambda self: self.unfinished)
    @rule(mishaps=mishaps())
    def go_wrong(self, mishaps: list[tuple[Mishap, int]]) -> None:
        for mishap, index in mishaps:
            self.running.fill()
            if not self.running.in_flight or not self.unfinished:
                return
            getattr(self, mishap.value)(index)

    def client_leaves(self, index: int) -> None:
        client = self.unfinished[index % len(self.unfinished)]
        client.is_aborted = True
        self.running.abort(client.request)

    def request_yields(self, index: int) -> None:
        placement = self.running.scheduler.placement
        # What is moved is moved by the step that is planned next: there must be one.
        most = 0 if placement.suspects else self.depth - 1
        while len(self.running.in_flight) > most:
            self.running.answer()
        running = placement.rows.running
        if running and not self.running.needs_snapshot:
            placement.preempt(running[index % len(running)].request, PreemptionCause.BLOCKS)
            self.running.fill()

    def request_yields_before_a_loss(self, index: int) -> None:
        """What a step in flight brings it may be spoiled when it has no row any more."""
        self.request_yields(index)
        if self.running.in_flight:
            loss = self.row_fails if index % 2 else self.step_fails
            loss(index // 2)

    def request_yields_during_its_run(self, index: int) -> None:
        """A step in flight may bring it several tokens, or fewer, when it has no row any more."""
        placement = self.running.scheduler.placement
        while len(self.running.in_flight) >= self.depth:
            self.running.answer()
        if placement.suspects or self.running.needs_snapshot:
            return
        running = [
            sequence.request
            for plan, _ in self.running.in_flight
            if plan.work.num_more_tokens is not None
            for row_id, stay_id in zip(plan.work.row_ids, plan.work.stay_ids, strict=True)
            if (sequence := placement.sequence_of(int(row_id), int(stay_id))) is not None
            and sequence.status is SequenceStatus.RUNNING
        ]
        if running:
            placement.preempt(running[index % len(running)], PreemptionCause.BLOCKS)
            self.running.fill()

    def urgent_request_comes(self, index: int) -> None:
        spec = random_spec(Random(index))
        self.add(replace(spec, scheduling=replace(spec.scheduling, priority=-2)))

    def step_fails(self, _index: int) -> None:
        self.running.fail()

    def step_is_not_executed(self, _index: int) -> None:
        plan, _ = self.running.in_flight[0]
        is_snapshot = plan.base_step_id is None
        self.running.skip(StepStatus.REFUSED if is_snapshot else StepStatus.NEED_SNAPSHOT)

    def row_fails(self, index: int, *, spoils_others: bool = False) -> None:
        plan, _ = self.running.in_flight[0]
        if len(plan.work.row_ids) == 0:
            return
        row = index % len(plan.work.row_ids)
        row_id, stay_id = int(plan.work.row_ids[row]), int(plan.work.stay_ids[row])
        sequence = self.running.scheduler.placement.sequence_of(row_id, stay_id)
        if sequence is not None:
            self.clients[sequence.request.client_key].has_bad_row = True
        self.running.count_fault()
        status = RowStatus.FAILED if index % 2 else RowStatus.INVALID_LOGITS
        self.running.answer(StepFault(rows={row_id: status}, spoils_others=spoils_others))

    def row_fails_and_spoils_others(self, index: int) -> None:
        self.row_fails(index, spoils_others=True)

    def row_is_nonsense(self, index: int) -> None:
        """What the result says of one row, if it counts, costs its request, and no other."""
        spoiled: list[Client] = []

        def spoil(plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
            rows = {row: client for row, client in self.clients_of(plan) if is_row_ok(outcome, row)}
            if not rows:
                return outcome
            row = list(rows)[index % len(rows)]
            rows[row].has_bad_row = True
            spoiled.append(rows[row])
            return spoil_row(outcome, row, plan.step_id, self.config.vocab_size)

        self.running.count_fault()
        self.running.answer(spoil=spoil)
        for client in spoiled:
            assert client.request.error is not None, "it was believed"
            assert client.request.error[0] == "ROW_FAILED"

    def clients_of(self, plan: StepPlan) -> Iterator[tuple[int, Client]]:
        """The rows of a step that count."""
        work, placement = plan.work, self.running.scheduler.placement
        each = zip(work.row_ids.tolist(), work.stay_ids.tolist(), strict=True)
        for row, (row_id, stay_id) in enumerate(each):
            sequence = placement.sequence_of(row_id, stay_id)
            if sequence is not None:
                yield row, self.clients[sequence.request.client_key]

    def grammar_is_never_compiled(self, index: int) -> None:
        """Its request ends, and costs nobody else a thing; unless it has its first token by now."""
        found = [client for client in self.unfinished if client.spec.params.grammar is not None]
        if found:
            client = found[index % len(found)]
            client.has_bad_row = True
            self.running.never_compiled.add(client.request.client_key)

    def result_breaks_contract(self, index: int) -> None:
        """Nothing of such a result is taken: a true one is still good, or the executor is lost."""
        true: list[StepOutcome] = []

        def spoil(plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
            if outcome.status is not StepStatus.OK:
                return outcome
            true.append(outcome)
            return spoil_step(plan, outcome, index // 2)

        try:
            self.running.answer(spoil=spoil)
        except ContractBroken:
            if index % 2:
                self.running.take(true[0])
            else:
                self.executor_is_lost(index)
        else:
            assert not true, "it was believed"

    def part_comes(self, index: int) -> None:
        """The oldest step reports some tokens, if it may; what ends with them makes room."""
        if self.running.may_report:
            self.running.report(index)
            self.running.fill()

    def result_contradicts_its_parts(self, index: int) -> None:
        """A row of which a part told something else costs its request, and no other."""
        self.part_comes(index)
        if not self.running.in_flight:
            return
        told = self.running.told
        found = [
            (row, client)
            for row, client in self.clients_of(self.running.in_flight[0][0])
            if row < len(told) and told[row]
        ]
        if not found:
            return
        row, client = found[index % len(found)]
        client.has_bad_row = True
        self.running.count_fault()

        def spoil(_plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
            return contradict(outcome, row, int(told[row]), index)

        self.running.answer(spoil=spoil)
        assert client.request.error is not None, "it was believed"
        assert client.request.error[0] == "ROW_FAILED"

    def part_breaks_contract(self, index: int) -> None:
        """Nothing of such a part is taken: the executor is lost, or goes on."""
        self.part_comes(index)
        if not self.running.in_flight:
            return
        plan, _ = self.running.in_flight[-1]
        num_more = plan.work.num_more_tokens
        counts = np.ones(len(plan.work.row_ids), np.int32)
        if index % 3 == 0:
            counts = np.append(counts, np.int32(1))
        elif index % 3 == 1 and num_more is not None:
            counts = num_more + 2
        elif plan.work.reports_parts and len(self.running.in_flight) == 1:
            return
        part = StepPart(plan.step_id, counts, np.ones(int(counts.sum()), np.int32))
        with pytest.raises(ContractBroken):
            self.running.take_part(part)
        if index % 2:
            self.executor_is_lost(index)

    def executor_is_lost(self, _index: int) -> None:
        self.running.count_fault()
        self.go_on_elsewhere(self.running.scheduler.evacuate())

    def core_breaks(self, _index: int) -> None:
        """A fault of ours, when all that a result brought was taken and nobody was told of it."""
        take = Results.take

        def take_and_break(*arguments: Any) -> None:  # noqa: ANN401
            take(*arguments)
            raise AssertionError("a fault of ours")

        self.running.count_fault()
        try:
            with mock.patch.object(Results, "take", take_and_break):
                self.running.answer()
        except AssertionError as error:
            if str(error) != "a fault of ours":
                raise
            for client in self.unfinished:
                client.saw_broken_core = True
            core = self.running.scheduler
            executor = ExecutorState("executor:1", 1, core.config, core, num_credits=1)
            executor.is_broken = executor.has_lost_events = True
            self.go_on_elsewhere(rescue(executor).requests)

    def go_on_elsewhere(self, requests: list[Request]) -> None:
        """All that were unfinished left a core; those that have not ended go to a new one."""
        unfinished, moved = self.unfinished, {request.client_key: request for request in requests}
        assert moved.keys() == {client.request.client_key for client in unfinished}
        self.connect()
        for client in unfinished:
            client.delivery.request = moved[client.request.client_key]
            if client.request.is_finished:
                client.delivery.is_finished = True
            else:
                self.running.adopt(client.delivery)

    def request_is_withdrawn(self, index: int) -> None:
        """It comes back at once, while steps of its last stay are in flight."""
        client = self.unfinished[index % len(self.unfinished)]
        losses = client.request.num_fruitless_losses
        moved = self.running.scheduler.withdraw(client.request.request_id)
        assert moved is not None
        assert moved.num_fruitless_losses == losses
        client.delivery.request = moved
        self.running.adopt(client.delivery)

    def core_is_restored(self, _index: int) -> None:
        scheduler = self.running.scheduler.restored()
        for client in self.unfinished:
            request = scheduler.find(client.request.request_id)
            assert request is not None
            client.delivery.request = request
        self.running.scheduler = scheduler

    # -- what holds ----------------------------------------------------------------------------

    @invariant()
    def core_is_consistent(self) -> None:
        if self.engine is None:
            return
        check_core(self.engine.scheduler)
        check_published(
            self.engine.scheduler.placement,
            [plan for plan, _ in self.engine.in_flight],
            self.contents,
            self.engine.runner,
        )

    @invariant()
    def clients_get_what_is_true(self) -> None:
        for client in self.clients.values():
            client.check(self.config)

    def drain(self) -> None:
        """Runs until nothing is left to do; somebody gets ahead again and again.

        Between two new tokens each row may at worst compute all its tokens again; in trials and
        other steps by turns, and each may have to be moved, to wait for results or for its grammar
        first.
        """
        config, progress, num_in_vain = self.config, (0, 0), 0
        num_chunks = -(-config.max_model_len // config.max_num_batched_tokens)
        most = 2 * config.max_num_seqs * (num_chunks + 2 + MAX_ASKED) + self.depth
        while self.running.step():
            before, progress = progress, self.progress()
            num_in_vain = 0 if progress != before else num_in_vain + 1
            assert num_in_vain <= most, f"nobody got ahead for {num_in_vain} steps"

    def progress(self) -> tuple[int, int]:
        """Never decreases: requests that ended, and tokens of the others."""
        known_tokens = self.running.scheduler.placement.known_tokens
        num_tokens = 0
        for client in self.clients.values():
            lengths = [len(known_tokens(sequence)) for sequence in client.request.sequences]
            # Which beams go on changes, how long they are does not.
            num_tokens += max(lengths) if client.spec.params.beam else sum(lengths)
        return len(self.clients) - len(self.unfinished), num_tokens

    def teardown(self) -> None:
        if self.engine is None or sys.exc_info()[0] is not None:
            return
        self.drain()
        self.core_is_consistent()
        self.clients_get_what_is_true()
        assert not self.unfinished
        assert self.running.scheduler.num_free_blocks == self.config.num_device_blocks
        assert self.running.scheduler.num_free_host_blocks == self.config.num_host_blocks
        check_emptied(self.running.scheduler.placement)


def contradict(outcome: StepOutcome, row: int, num_told: int, kind: int) -> StepOutcome:
    """`outcome` in which the row has other tokens than those told, or fewer."""
    assert outcome.token_counts is not None
    start = int(outcome.token_counts[:row].sum())
    if kind % 2:
        token_ids = outcome.token_ids.copy()
        token_ids[start + num_told - 1] ^= 1
        return replace(outcome, token_ids=token_ids)
    end = start + int(outcome.token_counts[row])
    return replace(
        outcome,
        token_ids=np.delete(outcome.token_ids, np.s_[start + num_told - 1 : end]),
        token_counts=_changed(outcome.token_counts, row, num_told - 1),
    )


_UNKNOWN_STATUS = 9


def is_row_ok(outcome: StepOutcome, row: int) -> bool:
    """Whether the executor says that it has computed the row."""
    is_ok = outcome.row_statuses is None or outcome.row_statuses[row] == RowStatus.OK
    return outcome.status is StepStatus.OK and is_ok


def spoil_row(outcome: StepOutcome, row: int, kind: int, vocab_size: int) -> StepOutcome:
    """`outcome` with nonsense for one row, which it says was computed; there are several kinds."""
    kinds = list(_spoiled_rows(outcome, row, vocab_size))
    return kinds[kind % len(kinds)]


def _spoiled_rows(outcome: StepOutcome, row: int, vocab_size: int) -> Iterator[StepOutcome]:
    if (scored := outcome.logprobs.get(row)) is not None:
        yield replace(outcome, logprobs={i: s for i, s in outcome.logprobs.items() if i != row})
        for wrong in _spoiled_scores(scored[-1], vocab_size):
            yield replace(outcome, logprobs={**outcome.logprobs, row: [*scored[:-1], wrong]})
        yield replace(outcome, logprobs={**outcome.logprobs, row: scored[:-1]})
    if scores := outcome.prompt_logprobs.get(row):
        for few in (scores[:-1], scores[1:], ()):
            yield replace(outcome, prompt_logprobs={**outcome.prompt_logprobs, row: few})
        wrong = replace(scores[-1], rank=0)
        some = {**outcome.prompt_logprobs, row: [*scores[:-1], wrong]}
        yield replace(outcome, prompt_logprobs=some)
    if outcome.token_counts is not None:
        yield from _spoiled_runs(outcome, row, vocab_size)
    elif outcome.token_ids[row] >= 0:
        for token_id in (vocab_size, -1, -(2**31)):
            yield replace(outcome, token_ids=_changed(outcome.token_ids, row, token_id))
    statuses = list(outcome.row_statuses or [RowStatus.OK] * len(outcome.counts))
    statuses[row] = _UNKNOWN_STATUS
    yield replace(outcome, row_statuses=statuses)


def _spoiled_runs(outcome: StepOutcome, row: int, vocab_size: int) -> Iterator[StepOutcome]:
    """Of a row that is allowed fewer than 1000 tokens."""
    assert outcome.token_counts is not None
    end = int(outcome.token_counts[: row + 1].sum())
    run = outcome.tokens_of(row)
    for tokens in ([], [*run[:-1], vocab_size], [*run[:-1], -1], [*run, *[1] * 1000]):
        start = end - len(run)
        before, after = outcome.token_ids[:start], outcome.token_ids[end:]
        yield replace(
            outcome,
            token_ids=np.concatenate([before, np.array(tokens, np.int32), after]),
            token_counts=_changed(outcome.token_counts, row, len(tokens)),
        )


def _spoiled_scores(scored: ScoredToken, vocab_size: int) -> Iterator[ScoredToken]:
    yield replace(scored, logprob=float("nan"))
    yield replace(scored, token_id=(scored.token_id + 1) % vocab_size)
    yield replace(scored, position=scored.position + 1)
    yield replace(scored, rank=0)
    if scored.top:
        yield replace(scored, top=[*scored.top[:-1], (vocab_size, -1.0)])
        yield replace(scored, top=[*scored.top, scored.top[0]])


def spoil_step(plan: StepPlan, outcome: StepOutcome, kind: int) -> StepOutcome:
    """`outcome` with nonsense that cannot be laid at any row's door; there are several kinds."""
    statuses = list(outcome.row_statuses or [RowStatus.OK] * len(outcome.counts))
    kinds = [
        replace(outcome, token_ids=np.append(outcome.token_ids, np.int32(1))),
        replace(outcome, row_statuses=[*statuses, RowStatus.OK]),
        replace(outcome, step_id=plan.step_id + 1),
    ]
    if len(outcome.token_ids):
        kinds.append(replace(outcome, token_ids=outcome.token_ids[:-1]))
    if statuses:
        kinds.append(replace(outcome, row_statuses=statuses[:-1]))
    if outcome.token_counts is not None:
        kinds.append(replace(outcome, token_counts=np.append(outcome.token_counts, np.int32(0))))
    if plan.base_step_id is None:
        kinds.append(StepOutcome(plan.step_id, StepStatus.NEED_SNAPSHOT))
    return kinds[kind % len(kinds)]


def _changed(column: np.ndarray, index: int, value: int) -> np.ndarray:
    changed = column.copy()
    changed[index] = value
    return changed
