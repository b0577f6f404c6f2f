"""Executors with numbers, and names of the requests that begin at each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scheduler_service.scheduler import Scheduler, effects, events
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.routing import Router
from scheduler_service.scheduler.values import (
    FleetConfig,
    Request,
    SamplingParams,
    SchedulingParams,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.machines import Machine
from tests.support.core.pure_fleet import PureFleet

MS = 1_000_000
# What executors take for a token of a step, at speed 1.
TOKEN_NS = MS
ONE_ROW = {"max_num_seqs": 1}
_DEFAULTS: dict[str, Any] = {"max_num_seqs": 8, "num_device_blocks": 64}
_MAX_STEPS = 5000


class RoutedFleet(PureFleet):
    """A `PureFleet` whose executors differ as `changes` say, and have one step in flight each.

    Executor 1 takes `slowness[1]` milliseconds for each token of a step. Time does not pass by
    itself. `assignments`: the latest of each request, by its id.
    """

    def __init__(
        self,
        *changes: Mapping[str, Any],
        policy: str = "fcfs",
        slowness: Mapping[int, int] | None = None,
        router: Router | None = None,
        num_credits: int = 1,
        max_num_waiting: int = 10_000,
    ) -> None:
        super().__init__()
        config = FleetConfig(queue_policy=policy, max_num_waiting=max_num_waiting)
        self.scheduler = Scheduler(config, router)
        self.numbered = [
            Machine(f"executor:{number}", **(_DEFAULTS | dict(each) | {"queue_policy": policy}))
            for number, each in enumerate(changes)
        ]
        self.assignments: dict[str, effects.RequestAssigned] = {}
        self._slowness = slowness or {}
        self._num_requests = 0
        self._num_seen = 0
        for machine in self.numbered:
            self.join(machine, num_credits=num_credits)
        self.settle()

    # -- executors -----------------------------------------------------------------------------

    def engine(self, number: int) -> Engine:
        """The engine of an executor."""
        return self.executor(self.numbered[number]).engine

    def running(self, number: int) -> list[str]:
        """Requests with a row at an executor, by name."""
        rows = self.engine(number).placement.rows.running
        return sorted({sequence.request.request_id for sequence in rows})

    def doubt(self, number: int, *, is_doubtful: bool = True) -> None:
        """Marks an executor as doubtful, or as reliable again."""
        address = self.numbered[number].address
        self.handle(events.ExecutorDoubted(address, is_doubtful=is_doubtful))

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Restricts new requests to a single executor within the context."""
        others = [n for n in range(len(self.numbered)) if n != number]
        others = [n for n in others if self.executor(self.numbered[n]).takes_requests]
        for other in others:
            self.doubt(other)
        yield
        for other in others:
            self.doubt(other, is_doubtful=False)

    # -- requests ------------------------------------------------------------------------------

    def push(
        self,
        name: str,
        prompt: int | list[int] = 3,
        *,
        max_tokens: int = 50,
        n: int = 1,
        **scheduling: object,
    ) -> Request:
        """A client submits a request; `prompt` is that many tokens, the same for all, or these."""
        request = self.make_request(name, prompt, max_tokens=max_tokens, n=n, **scheduling)
        self.handle(events.RequestSubmitted(request))
        return request

    def make_request(
        self,
        name: str,
        prompt: int | list[int] = 3,
        *,
        max_tokens: int = 50,
        n: int = 1,
        **scheduling: object,
    ) -> Request:
        """Returns a request that is not submitted yet; see `push`."""
        self._num_requests += 1
        tokens = [1 + at % 90 for at in range(prompt)] if isinstance(prompt, int) else prompt
        request = Request.create(
            name,
            tokens,
            SamplingParams(max_tokens=max_tokens, n=n),
            arrival=self._num_requests,
            seed=0,
            scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
        )
        request.client_key = self._num_requests
        return request

    def begun(self) -> list[tuple[str, int]]:
        """Settles; returns (request, executor) of requests begun since the last call."""
        self.settle()
        new, self._num_seen = self.effects[self._num_seen :], len(self.effects)
        assigned = [effect for effect in new if isinstance(effect, effects.RequestAssigned)]
        for each in assigned:
            self.assignments[each.request.request_id] = each
        numbers = {machine.address: n for n, machine in enumerate(self.numbered)}
        return [(each.request.request_id, numbers[each.address]) for each in assigned]

    def names_begun(self) -> list[str]:
        """Names of what `begun` returns."""
        return [name for name, _ in self.begun()]

    # -- steps ---------------------------------------------------------------------------------

    def answer_at(self, number: int) -> None:
        """An executor answers its oldest step, if it has one."""
        machine = self.numbered[number]
        if not self.held.get(machine.address):
            return
        plan, _ = self.held[machine.address][0]
        took_us = plan.num_tokens * self._slowness.get(number, 1) * TOKEN_NS // 1000

        def alter(result: pb.StepResult) -> None:
            result.timings.Clear()
            result.timings.forward_us = took_us

        self.answer(machine, alter)

    def step(self) -> list[tuple[str, int]]:
        """Answers a step of every executor; returns begun requests."""
        for number in range(len(self.numbered)):
            self.answer_at(number)
        return self.begun()

    def step_until_idle(self, number: int) -> None:
        """Answers steps of an executor until its requests end."""
        self.settle()
        for _ in range(_MAX_STEPS):
            if not self.held[self.numbered[number].address]:
                return
            self.answer_at(number)
        raise AssertionError("runs for ever")

    # -- what executors have when a test begins ------------------------------------------------

    def compute(self, number: int, prompt: list[int]) -> None:
        """An executor has computed a prompt, whose blocks are cached, and nobody runs there."""
        with self.only(number):
            self.push(f"computed-{self._num_requests}", prompt, max_tokens=1)
            self.step_until_idle(number)
        self.begun()

    def begin(self, number: int, prompt: list[int], max_tokens: int = 60) -> str:
        """An executor computes the first step of a request; returns its name."""
        name = f"begun-{self._num_requests}"
        with self.only(number):
            self.push(name, prompt, max_tokens=max_tokens)
            self.begun()
        return name


def measured(*changes: Mapping[str, object], slowness: tuple[int, ...] = ()) -> RoutedFleet:
    """Executors with many blocks, whose speeds were measured."""
    pool = {"num_device_blocks": 256}
    fleet = RoutedFleet(
        *[pool | dict(each) for each in changes], slowness=dict(enumerate(slowness))
    )
    for number in range(len(changes)):
        fleet.compute(number, [90 + number] * 70)
    return fleet


LONG = [1 + at % 90 for at in range(160)]
# 40 tokens with which prompts begin.
SYSTEM = list(range(1, 41))


def busy_holder(policy: str = "fcfs") -> RoutedFleet:
    """Fleet whose executor 0 caches `LONG` and has prompts for two full steps."""
    many = {"num_device_blocks": 256, "max_num_seqs": 32}
    fleet = RoutedFleet(many, many, policy=policy)
    for number in (0, 1):
        fleet.compute(number, [90 + number] * 70)
    fleet.compute(0, LONG)
    fleet.begin(0, [88] * 128)
    return fleet
