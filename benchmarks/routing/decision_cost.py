"""What a decision costs the scheduler, with many executors and many requests that wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.report import emit, percentile
from scheduler_service.scheduler import Scheduler, effects, events
from scheduler_service.scheduler.routing import Choice, HostState, PrefixRouter
from scheduler_service.scheduler.values import (
    FleetConfig,
    Int32Array,
    Request,
    SamplingParams,
    SchedulerConfig,
    StepPlan,
)
from tests.support.core.virtual_fleet import StepCosts, outcome_of

NUM_EXECUTORS = 64
NUM_WAITING = 10_000
_NUM_MEASURED = 400
_NUM_SYSTEM_TOKENS = 2048
_COSTS = StepCosts(step_us=20_000, row_us=0, prompt_token_us=0)
_MS_NS = 1_000_000
_CONFIG = SchedulerConfig(
    block_size=16,
    num_device_blocks=4096,
    max_num_seqs=16,
    max_num_batched_tokens=2048,
    max_model_len=8192,
    max_num_waiting=NUM_WAITING,
    vocab_size=2**20,
    eos_token_ids=frozenset(),
)


class _WatchedRouter(PrefixRouter):
    """Remembers the executors that it compares."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[HostState] = []

    def add(self, state: HostState) -> None:
        self.states.append(state)
        super().add(state)

    def remove(self, state: HostState) -> None:
        self.states.remove(state)
        super().remove(state)


class _Loaded:
    """A scheduler of executors of which each has computed some of the system prompts.

    Every executor has one step in flight at most. `assigned`: the requests at each executor.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._rng = np.random.default_rng(0)
        self.router = _WatchedRouter()
        fleet = FleetConfig(max_num_waiting=NUM_WAITING)
        self.scheduler = Scheduler(fleet, self.router)
        self._now_ns = 0
        self._wakes_at_ns: int | None = None
        self._in_flight: dict[str, StepPlan] = {}
        self.assigned: dict[str, list[str]] = {}
        self._systems = [self._text(_NUM_SYSTEM_TOKENS) for _ in range(16)]
        self._num_requests = 0
        self.addresses = [f"executor:{number}" for number in range(NUM_EXECUTORS)]
        for number, address in enumerate(self.addresses):
            self.assigned[address] = []
            self.handle(events.ExecutorJoined(address, 1, config, 1))
            self.handle(events.ExecutorConnected(address))
            # No other executor takes requests meanwhile.
            for system in (number % 16, number % 5):
                self.submit(self.request(self._systems[system]))
                self.abort_all(address)
            self.handle(events.ExecutorDoubted(address, is_doubtful=True))
        for address in self.addresses:
            self.handle(events.ExecutorDoubted(address, is_doubtful=False))
        self.settle()

    def _text(self, num_tokens: int) -> Int32Array:
        return self._rng.integers(10, 2**20, num_tokens).astype(np.int32)

    def request(self, system: Int32Array | None = None) -> Request:
        """Returns another request, with a system prompt."""
        self._num_requests += 1
        if system is None:
            system = self._systems[self._num_requests % 16]
        prompt = np.concatenate([system, self._text(40)])
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        return Request.create(
            f"r{self._num_requests}", prompt, params, arrival=self._num_requests, seed=0
        )

    def best(self, request: Request) -> Choice | None:
        """Returns the best executor for a request."""
        prefixes = self.router.find(request)
        return next(self.router.rank(request, self.router.states, prefixes), None)

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        """Passes an event in, and notes what follows."""
        for effect in self.scheduler.handle(event, self._now_ns):
            match effect:
                case effects.SendStep(address, plan):
                    self._in_flight[address] = plan
                case effects.RequestAssigned(request, address):
                    self.assigned[address].append(request.request_id)
                case effects.WakeAt(at_ns):
                    self._wakes_at_ns = at_ns

    def submit(self, request: Request) -> None:
        """A client submits a request, and a tick follows if one is due."""
        self.handle(events.RequestSubmitted(request))
        self.settle()

    def settle(self) -> None:
        """Passes the ticks that are due."""
        while self._wakes_at_ns is not None and self._wakes_at_ns <= self._now_ns:
            self._wakes_at_ns = None
            self.handle(events.Tick())

    def answer(self, address: str) -> None:
        """An executor answers its step."""
        outcome = outcome_of(self._in_flight.pop(address), _COSTS)
        self.handle(events.StepCompleted(address, outcome))

    def abort_all(self, address: str) -> None:
        """Ends the requests of an executor, which has no step in flight afterwards."""
        while address in self._in_flight:
            self.answer(address)
            for request_id in self.assigned[address]:
                self.handle(events.RequestAborted(request_id))
            self.assigned[address].clear()
            self.settle()
        self._now_ns += _MS_NS


def _measure(prepare: Callable[[int], Callable[[], object]]) -> list[float]:
    """Microseconds of what `prepare` returns, each time."""
    taken_us = []
    for number in range(_NUM_MEASURED):
        call = prepare(number)
        start_ns = time.thread_time_ns()
        call()
        taken_us.append((time.thread_time_ns() - start_ns) / 1e3)
    return taken_us


def measure_decisions() -> None:
    """Prints CPU times of a choice, of an arrival and of a result.

    An arrival at open executors is timed until steps are planned with it.
    """
    idle = _Loaded(_CONFIG)

    def choose(_number: int) -> Callable[[], object]:
        request = idle.request()
        return lambda: idle.best(request)

    _emit("choice among 64 open executors, prompt of 2088 tokens seen for the first time", choose)

    def choose_again(_number: int) -> Callable[[], object]:
        request = idle.request()
        idle.best(request)
        return lambda: idle.best(request)

    _emit("the same, looked up before", choose_again)

    def begin(_number: int) -> Callable[[], object]:
        for address in idle.addresses:
            idle.abort_all(address)
        request = idle.request()
        return lambda: idle.submit(request)

    _emit("an arrival, with its place in a core", begin)
    full = _Loaded(replace(_CONFIG, max_num_seqs=2))
    for _ in range(NUM_WAITING):
        full.submit(full.request())

    def arrive(_number: int) -> Callable[[], object]:
        request = full.request()
        return lambda: full.submit(request)

    _emit("an arrival behind 10,000 that wait", arrive)

    def refill(number: int) -> Callable[[], object]:
        address = full.addresses[number % NUM_EXECUTORS]
        full.handle(events.RequestAborted(full.assigned[address].pop(0)))
        full.settle()
        return lambda: full.answer(address)

    _emit("an executor that has room for one of 10,000", refill)


def _emit(what: str, prepare: Callable[[int], Callable[[], object]]) -> None:
    taken_us = _measure(prepare)
    emit(
        "routing_decision",
        what=what,
        executors=NUM_EXECUTORS,
        us_min=round(min(taken_us), 1),
        us_p50=percentile(taken_us, 50),
        us_p99=percentile(taken_us, 99),
    )
