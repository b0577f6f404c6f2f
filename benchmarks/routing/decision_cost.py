"""What a decision costs the scheduler, with many executors and many requests that wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scheduler_service.fleet.fleet_queue import FleetQueue

from benchmarks.report import emit, percentile
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepOutcome, StepStatus
from scheduler_service.core.request import Int32Array, Request
from scheduler_service.core.sampling_params import SamplingParams
from tests.support.core.engine_with_queue import EngineWithQueue

NUM_EXECUTORS = 64
NUM_WAITING = 10_000
_NUM_MEASURED = 400
_NUM_SYSTEM_TOKENS = 2048
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


class _Loaded:
    """Executors of which each has computed some of the system prompts, and a queue before them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._rng = np.random.default_rng(0)
        self.cores = [EngineWithQueue(config) for _ in range(NUM_EXECUTORS)]
        self.queue = FleetQueue("fcfs", {})
        self._systems = [self._text(_NUM_SYSTEM_TOKENS) for _ in range(16)]
        self._num_requests = 0
        for number, core in enumerate(self.cores):
            for system in (number % 16, number % 5):
                core.readmit(self.request(self._systems[system]))
                self.step(core)

    def _text(self, num_tokens: int) -> Int32Array:
        return self._rng.integers(10, 2**20, num_tokens).astype(np.int32)

    def request(self, system: Int32Array | None = None) -> Request:
        """Another one, with a system prompt."""
        self._num_requests += 1
        if system is None:
            system = self._systems[self._num_requests % 16]
        prompt = np.concatenate([system, self._text(40)])
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        return Request.create(
            f"r{self._num_requests}", prompt, params, arrival=self._num_requests, seed=0
        )

    def step(self, core: EngineWithQueue) -> None:
        """A step of one executor, with its result."""
        plan = core.schedule()
        assert plan is not None
        token_ids = np.full(len(plan.work.row_ids), 7, np.int32)
        if plan.work.samples is not None:
            token_ids[~plan.work.samples] = -1
        outcome = StepOutcome(plan.step_id, StepStatus.OK, token_ids, compute_us=20_000)
        core.apply(outcome)

    def dispatch(self, changed: list[EngineWithQueue]) -> int:
        """Gives what can be given; how many that were."""
        num_given = 0
        for request, host, _ in self.queue.dispatch(0, self.cores, changed):
            host.readmit(request)  # type: ignore[attr-defined]
            num_given += 1
        return num_given


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
    """Prints what the choice itself takes, and all that the queue does around it."""
    idle = _Loaded(_CONFIG)
    idle.dispatch(idle.cores)
    states = idle.queue.host_states

    def choose(_number: int) -> Callable[[], object]:
        request = idle.request()
        return lambda: next(idle.queue.router.rank(request, states), None)

    _emit("choice among 64 open executors, prompt of 2088 tokens seen for the first time", choose)

    def choose_again(number: int) -> Callable[[], object]:
        request = idle.request()
        next(idle.queue.router.rank(request, states), None)
        return lambda: next(idle.queue.router.rank(request, states), None)

    _emit("the same, looked up before", choose_again)

    def wait(_number: int) -> Callable[[], object]:
        idle.queue.push(request := idle.request())
        return lambda: (idle.dispatch([]), request)

    _emit("an arrival, with its place in a core", wait)
    full = _Loaded(replace(_CONFIG, max_num_seqs=2))
    for _ in range(NUM_WAITING):
        full.queue.push(full.request())
    full.dispatch(full.cores)

    def arrive(_number: int) -> Callable[[], object]:
        full.queue.push(full.request())
        return lambda: full.dispatch([])

    _emit("an arrival behind 10,000 that wait", arrive)

    def refill(number: int) -> Callable[[], object]:
        core = full.cores[number % NUM_EXECUTORS]
        for running in list(core.placement.requests)[:1]:
            core.abort(running)
            full.queue.forget(running)
        return lambda: full.dispatch([core])

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
