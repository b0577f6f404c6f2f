"""Several cores with an executor each, which die of requests, and a quarantine for these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random

from scheduler_service.core.plan import StepPlan
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.fleet.executor_losses import Loss, LossCause
from scheduler_service.fleet.host_state import Host
from scheduler_service.fleet.quarantine import Quarantine
from tests.support.core.clients import Client
from tests.support.core.driver import make_config
from tests.support.core.engine import CoreEngine
from tests.support.core.plan_executor import PlanExecutor
from tests.support.core.truth import Oracle, Spec
from tests.support.fakes.fake_runner import FakeRunner

# Whether an executor dies of a step; it is given the ids of the requests that compute in it.
Kills = Callable[[Collection[str]], bool]
_MAX_STEPS = 100_000


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
    """Executors step by turns; one that died is back, with empty pools, when others had a turn.

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
        self._engines = [self._new_engine() for _ in range(num_executors)]
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
        delivery = self._least_loaded.add(request)
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
    def _least_loaded(self) -> CoreEngine[StepPlan]:
        return min(self._engines, key=lambda engine: engine.scheduler.num_unfinished_tokens)

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
        for engine in self._engines:
            assert engine.scheduler.num_free_blocks == self.config.num_device_blocks

    def step(self) -> None:
        """A step of each executor, if it has something to do."""
        self.num_steps += 1
        for host, engine in enumerate(self._engines):
            engine.fill()
            if not engine.in_flight:
                continue
            plan, _ = engine.in_flight[0]
            names = self._names(engine, plan)
            if sum(kills(names) for kills in self._kills):  # all of them count
                self._lose(host)
            else:
                engine.answer()
        self._check_one_ward()
        self._note_tokens()

    def _names(self, engine: CoreEngine[StepPlan], plan: StepPlan) -> set[str]:
        work, placement = plan.work, engine.scheduler.placement
        each = zip(work.row_ids.tolist(), work.stay_ids.tolist(), strict=True)
        sequences = (placement.sequence_of(row_id, stay_id) for row_id, stay_id in each)
        return {sequence.request.request_id for sequence in sequences if sequence is not None}

    def _lose(self, host: int) -> None:
        self.num_deaths += 1
        lost = self._engines[host].scheduler.evacuate()
        self._engines[host] = self._new_engine()
        loss = Loss(self._cause, self.num_deaths, self.num_steps, has_answered=True)
        self.quarantine.executor_lost(lost, loss)
        for request in sorted(lost, key=lambda moved: moved.arrival):
            delivery = self.clients[request.request_id].delivery
            delivery.request = request
            delivery.is_finished = request.is_finished
            if not request.is_finished and not self.quarantine.holds(request):
                self._least_loaded.adopt(delivery)
        engines: dict[Host, CoreEngine[StepPlan]] = {e.scheduler: e for e in self._engines}
        for request, new_host in self.quarantine.dispatch(list(engines)):
            engines[new_host].adopt(self.clients[request.request_id].delivery)

    def _check_one_ward(self) -> None:
        """Those that are tried apart are all in one place."""
        wards = {
            host
            for host, engine in enumerate(self._engines)
            for request in engine.scheduler.placement.requests.values()
            if request.trial_size
        }
        assert len(wards) <= 1

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
