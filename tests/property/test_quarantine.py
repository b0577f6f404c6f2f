"""Requests of which executors die are found, whatever their rhythm, and nobody else is failed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler import (
    FORGIVING_TOKENS,
    NUM_ALONE_IN_A_STORM,
    QUARANTINE_REASON,
    RETURN_NS,
    Loss,
    LossCause,
    Quarantine,
)
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.values import BeamParams, Request, SamplingParams, StepPlan
from tests.support.core.driver import make_config
from tests.support.core.engine import Client, CoreEngine
from tests.support.core.plan_executor import PlanExecutor
from tests.support.fakes.expected_outputs import Oracle, Spec
from tests.support.fakes.fake_runner import FakeRunner

# Whether an executor dies of a step; it is given the ids of the requests that compute in it.
Kills = Callable[[Collection[str]], bool]
_MAX_STEPS = 100_000
STEP_NS = 20_000_000


@dataclass(slots=True)
class EveryStep:
    """Kills with each `period`th step that a request is in, counted from the latest death."""

    request_id: str
    period: int
    num_steps: int = 0

    def __call__(self, request_ids: Collection[str]) -> bool:
        self.num_steps += self.request_id in request_ids
        if self.num_steps < self.period:
            return False
        self.num_steps = 0
        return True


@dataclass(slots=True)
class Widening:
    """As `EveryStep`, each time two steps later: it comes through what it was tried with before."""

    request_id: str
    period: int
    num_steps: int = 0

    def __call__(self, request_ids: Collection[str]) -> bool:
        self.num_steps += self.request_id in request_ids
        if self.num_steps < self.period:
            return False
        self.period, self.num_steps = self.period + 2, 0
        return True


@dataclass(slots=True)
class AtRandom:
    """Executors die of nothing in particular, one of so many steps."""

    one_of: int
    rng: Random

    def __call__(self, request_ids: Collection[str]) -> bool:
        return self.rng.randrange(self.one_of) == 0


class PoisonedFleet:
    """Executors step by turns; one that died is back, with empty pools, after `restart_steps`.

    `num_deaths`: of all executors. `pauses`: by request, the most steps of the fleet between two of
    its tokens.
    """

    def __init__(
        self,
        kills: Sequence[Kills],
        num_executors: int = 3,
        *,
        depth: int = 2,
        max_losses: int = 2,
        cause: LossCause = LossCause.DIED,
        restart_steps: int = 0,
    ) -> None:
        self.config = make_config(
            num_device_blocks=4096,
            max_num_seqs=128,
            max_num_batched_tokens=512,
            max_model_len=1000,
            max_num_waiting=256,
            vocab_size=997,
            eos_token_ids=frozenset(),
        )
        self.quarantine = Quarantine(max_losses)
        self.clients: dict[str, Client] = {}
        self.pauses = Counter[str]()
        self.num_deaths = self.num_steps = 0
        self._kills = kills
        self._depth = depth
        self._cause = cause
        self._oracle = Oracle(self.config)
        self._restart_steps = restart_steps
        # None: it died, and is on its way back since `_back_at`.
        self._engines: list[CoreEngine[StepPlan] | None] = [
            self._new_engine() for _ in range(num_executors)
        ]
        self._back_at = [0] * num_executors
        self._hold_until_ns = 0
        # Requests that wait for any executor.
        self._waiting: dict[str, Request] = {}
        # By request: its tokens, and when it got the latest.
        self._latest: dict[str, tuple[int, int]] = {}

    def _new_engine(self) -> CoreEngine[StepPlan]:
        runner = FakeRunner(
            block_size=self.config.block_size,
            num_device_blocks=self.config.num_device_blocks,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
        )
        return CoreEngine(self.config, runner, PlanExecutor, depth=self._depth)

    # -- requests ------------------------------------------------------------------------------

    def add(self, params: SamplingParams, num_prompt_tokens: int = 5) -> Request:
        """A new request, named r1, r2, ..."""
        number = len(self.clients) + 1
        spec = Spec((number, *range(300, 299 + num_prompt_tokens)), params, seed=number)
        request, truth = self._oracle.make_request(spec, number)
        (least_loaded,) = self._by_load[:1]
        delivery = least_loaded.add(request)
        self.clients[request.request_id] = Client(spec, truth, delivery)
        self._latest[request.request_id] = (0, self.num_steps)
        return request

    def request(self, request_id: str) -> Request:
        """A request as it is now."""
        return self.clients[request_id].request

    @property
    def unfinished(self) -> list[str]:
        """The names of those that go on."""
        return [name for name, client in self.clients.items() if not client.request.is_finished]

    @property
    def living(self) -> list[CoreEngine[StepPlan]]:
        """Executors that are there."""
        return [engine for engine in self._engines if engine is not None]

    @property
    def _by_load(self) -> list[CoreEngine[StepPlan]]:
        return sorted(self.living, key=lambda engine: engine.scheduler.num_unfinished_tokens)

    @property
    def now_ns(self) -> int:
        """By the clock of the quarantine."""
        return self.num_steps * STEP_NS

    # -- steps ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Until all have ended, and then checks what they got."""
        for _ in range(_MAX_STEPS):
            if not self.unfinished:
                break
            self.step()
        for client in self.clients.values():
            if client.request.error is None:
                client.check(self.config)
        assert not self.unfinished
        for engine in self.living:
            assert engine.scheduler.num_free_blocks == self.config.num_device_blocks

    def step(self) -> None:
        """A step of each executor, if it has something to do."""
        self.num_steps += 1
        for host, engine in enumerate(self._engines):
            if engine is None:
                if self.num_steps >= self._back_at[host]:
                    self._engines[host] = self._new_engine()
                    self._dispatch()
                continue
            engine.fill()
            if not engine.in_flight:
                continue
            plan, _ = engine.in_flight[0]
            names = self._names(engine, plan)
            if sum(kills(names) for kills in self._kills):  # all of them count
                self._lose(host, engine)
            else:
                engine.answer()
        self._dispatch()
        self._check_one_ward()
        self._note_tokens()

    def _names(self, engine: CoreEngine[StepPlan], plan: StepPlan) -> set[str]:
        work, placement = plan.work, engine.scheduler.placement
        each = zip(work.row_ids.tolist(), work.stay_ids.tolist(), strict=True)
        sequences = (placement.sequence_of(row_id, stay_id) for row_id, stay_id in each)
        return {sequence.request.request_id for sequence in sequences if sequence is not None}

    def _lose(self, host: int, engine: CoreEngine[StepPlan]) -> None:
        self.num_deaths += 1
        num_living = len(self.living)
        if num_living > 1:
            self._hold_until_ns = self.now_ns + RETURN_NS
        lost = engine.scheduler.evacuate()
        self._engines[host] = self._new_engine() if self._restart_steps == 0 else None
        self._back_at[host] = self.num_steps + self._restart_steps
        loss = Loss(self._cause, self.num_deaths, self.now_ns, True, num_living)
        verdict = self.quarantine.executor_lost(lost, loss)
        for request in lost:
            delivery = self.clients[request.request_id].delivery
            delivery.request = request
            delivery.is_finished = request.is_finished
            if not request.is_finished and not self.quarantine.holds(request):
                self._waiting[request.request_id] = request
        self._waiting |= {request.request_id: request for request in verdict.released}
        self._dispatch()

    def _dispatch(self) -> None:
        """Gives all that wait to executors that are there, isolated ones first."""
        engines: dict[Engine, CoreEngine[StepPlan]] = {e.scheduler: e for e in self.living}
        for request_id, host in self.quarantine.to_recall(list(engines), self.now_ns):
            moved = engines[host].scheduler.withdraw(request_id)
            assert moved is not None
            self.clients[request_id].delivery.request = moved
            self.quarantine.recalled(moved)
        for request, new_host in self.quarantine.dispatch(list(engines), self.now_ns):
            engines[new_host].adopt(self.clients[request.request_id].delivery)
        for request in sorted(self._waiting.values(), key=lambda moved: moved.arrival):
            if not self.living:
                break
            del self._waiting[request.request_id]
            if not request.is_finished:
                (least_loaded,) = self._by_load[:1]
                least_loaded.adopt(self.clients[request.request_id].delivery)

    def _check_one_ward(self) -> None:
        """Those that are tried apart are all in one place."""
        wards = {
            host
            for host, engine in enumerate(self.living)
            for request in engine.scheduler.placement.requests.values()
            if request.trial_size
        }
        assert len(wards) <= 1
        # Of one that died when it was the last itself, nobody waits for the return.
        if len(self.living) == 1 and self.now_ns < self._hold_until_ns:
            assert not wards, "the last executor is risked"

    def _note_tokens(self) -> None:
        for name, client in self.clients.items():
            num_tokens = sum(map(len, client.delivery.tokens))
            before, at_step = self._latest[name]
            if client.request.is_finished:
                self.quarantine.forget(name)
            elif num_tokens == before:
                self.pauses[name] = max(self.pauses[name], self.num_steps - at_step)
                continue
            self._latest[name] = (num_tokens, self.num_steps)


MAX_TOKENS = 130
PLAIN = SamplingParams(max_tokens=MAX_TOKENS)
KINDS = (
    PLAIN,
    SamplingParams(max_tokens=MAX_TOKENS, n=3),
    SamplingParams(max_tokens=MAX_TOKENS, n=2, best_of=4),
    SamplingParams(max_tokens=MAX_TOKENS, beam=BeamParams(3)),
)


def fill(fleet: PoisonedFleet, count: int, poison: SamplingParams = PLAIN) -> None:
    """The first is the poison."""
    fleet.add(poison)
    for number in range(1, count):
        fleet.add(SamplingParams(max_tokens=20 + 7 * number % 60))


def check_ends(fleet: PoisonedFleet, *guilty: str) -> None:
    """The guilty are failed by name, all others have their tokens, which `run` compares."""
    reasons = {name: client.request.error for name, client in fleet.clients.items()}
    assert {name for name, error in reasons.items() if error is not None} == set(guilty)
    assert all(error is None or error[0] == QUARANTINE_REASON for error in reasons.values())


@pytest.mark.cases(10)
@pytest.mark.parametrize("max_losses", [1, 2])
@pytest.mark.parametrize("period", [1, 5, FORGIVING_TOKENS])
@pytest.mark.parametrize("kind", KINDS)
def test_poison_is_failed_after_one_more_than_is_allowed_when_it_kills_often(
    kind: SamplingParams, period: int, max_losses: int
) -> None:
    fleet = PoisonedFleet([EveryStep("r1", period)], max_losses=max_losses)
    fill(fleet, 8, kind)

    fleet.run()

    check_ends(fleet, "r1")
    assert fleet.num_deaths == max_losses + 1


@pytest.mark.parametrize("period", [17, 20, 40, 100])
def test_poison_costs_two_more_each_time_that_it_kills_half_as_often(period: int) -> None:
    fleet = PoisonedFleet([EveryStep("r1", period)])
    fill(fleet, 8, SamplingParams(max_tokens=900))

    fleet.run()

    check_ends(fleet, "r1")
    # Some are forgiven before the next, and longer trials are repeated.
    assert fleet.num_deaths <= 5 + 2 * log2((period - 1) / FORGIVING_TOKENS)


def test_poison_is_failed_when_it_comes_through_trials_and_kills_later() -> None:
    fleet = PoisonedFleet([Widening("r1", 2)])
    fill(fleet, 8, SamplingParams(max_tokens=900))

    fleet.run()

    check_ends(fleet, "r1")
    assert fleet.num_deaths <= 12


@pytest.mark.parametrize("periods", [(1, 1), (3, 5), (1, 7), (12, 2)])
def test_two_poisons_are_failed_when_they_kill_together(periods: tuple[int, int]) -> None:
    fleet = PoisonedFleet([EveryStep("r1", periods[0]), EveryStep("r2", periods[1])])
    fleet.add(PLAIN)
    fill(fleet, 8)

    fleet.run()

    check_ends(fleet, "r1", "r2")
    assert fleet.num_deaths <= (2 + NUM_ALONE_IN_A_STORM) + (2 + 1)


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")), deadline=None)
@given(
    periods=st.lists(st.integers(1, FORGIVING_TOKENS), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    num_executors=st.integers(1, 4),
    max_losses=st.integers(1, 3),
)
def test_poisons_are_failed_and_only_they_when_requests_of_all_kinds_run(
    periods: list[int], seed: int, depth: int, num_executors: int, max_losses: int
) -> None:
    rng, names = Random(seed), [f"r{number}" for number in range(1, len(periods) + 1)]
    kills = [EveryStep(name, period) for name, period in zip(names, periods, strict=True)]
    fleet = PoisonedFleet(kills, num_executors, depth=depth, max_losses=max_losses)
    for _ in names:
        fleet.add(rng.choice(KINDS))
    for _ in range(rng.randrange(4)):
        fleet.add(SamplingParams(max_tokens=rng.randrange(1, 40), n=rng.choice([1, 1, 2])))

    fleet.run()

    check_ends(fleet, *names)
    each = max_losses + NUM_ALONE_IN_A_STORM + 1
    assert fleet.num_deaths <= each * len(names)


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")), deadline=None)
@given(
    num_poisons=st.integers(1, 6),
    num_innocents=st.integers(0, 12),
    num_executors=st.integers(1, 6),
    restart_steps=st.sampled_from([0, 1, 20, 300]),
    depth=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_poisons_cost_one_executor_each_and_a_few_before_when_they_come_at_once(
    num_poisons: int,
    num_innocents: int,
    num_executors: int,
    restart_steps: int,
    depth: int,
    seed: int,
) -> None:
    rng = Random(seed)
    names = [f"r{number}" for number in range(1, num_poisons + num_innocents + 1)]
    poisons = rng.sample(names, num_poisons)
    fleet = PoisonedFleet(
        [EveryStep(name, 1) for name in poisons],
        num_executors,
        depth=depth,
        restart_steps=restart_steps,
    )
    for _ in names:
        fleet.add(SamplingParams(max_tokens=rng.randrange(1, 60)))

    fleet.run()

    check_ends(fleet, *poisons)
    # Each executor may die of some twice before these are isolated, and once after the first of
    # them is failed.
    assert fleet.num_deaths <= num_poisons + 2 * min(num_poisons, num_executors) + 1


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")), deadline=None)
@given(
    arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    num_executors=st.integers(1, 4),
    restart_steps=st.sampled_from([0, 20, 300]),
    seed=st.integers(0, 2**32),
)
def test_poisons_cost_three_executors_each_at_most_whenever_they_come(
    arrivals: list[int], num_executors: int, restart_steps: int, seed: int
) -> None:
    rng = Random(seed)
    poisons: list[str] = []
    kills = [EveryStep(f"poison {number}", 1) for number in range(len(arrivals))]
    fleet = PoisonedFleet(kills, num_executors, restart_steps=restart_steps)
    for at_step in sorted(arrivals):
        while fleet.num_steps < at_step or not fleet.living:
            fleet.step()
        for _ in range(rng.randrange(3)):
            fleet.add(SamplingParams(max_tokens=rng.randrange(1, 60)))
        kills[len(poisons)].request_id = fleet.add(PLAIN).request_id
        poisons.append(kills[len(poisons)].request_id)

    fleet.run()

    check_ends(fleet, *poisons)
    assert fleet.num_deaths <= 3 * len(poisons)


@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_failed_when_executors_die_of_nothing_in_particular(seed: int) -> None:
    fleet = PoisonedFleet([AtRandom(300, Random(seed))])
    for number in range(16):
        fleet.add(SamplingParams(max_tokens=50 + 20 * number))

    fleet.run()

    check_ends(fleet)
    assert fleet.num_deaths >= 2


@pytest.mark.parametrize("seed", range(4))
def test_poison_is_failed_when_executors_die_of_other_things_too(seed: int) -> None:
    fleet = PoisonedFleet([EveryStep("r1", 3), AtRandom(300, Random(seed))])
    fill(fleet, 16)

    fleet.run()

    check_ends(fleet, "r1")


def test_poison_is_failed_when_its_executors_are_only_out_of_reach() -> None:
    fleet = PoisonedFleet([EveryStep("r1", 2)], cause=LossCause.SILENT)
    fill(fleet, 8)

    fleet.run()

    check_ends(fleet, "r1")
    assert fleet.num_deaths == 2 + NUM_ALONE_IN_A_STORM
