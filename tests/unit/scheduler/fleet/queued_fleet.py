"""Some cores with one queue before them, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_service.assignment import Assignment
from scheduler_service.core.request import Request, SchedulingParams
from scheduler_service.fleet.fleet_queue import FleetQueue
from scheduler_service.fleet.host_state import Host
from tests.support.core.driver import CoreDriver


class Fleet:
    """Some cores, a queue before them, and a clock."""

    def __init__(
        self,
        *cores: Mapping[str, object],
        policy: str = "fcfs",
        weights: Mapping[str, float] | None = None,
    ) -> None:
        named: dict[str, Any] = {"queue_policy": policy, "tenant_weights": weights or {}}
        self.drivers = [CoreDriver(**(named | dict(core))) for core in cores]
        self.queue = FleetQueue(policy, weights or {})
        self.now_ns = 0
        self.num_requests = 0
        self.taken_back: list[str] = []
        self.assignments: dict[str, Assignment] = {}

    def push(
        self, name: str, prompt: int = 3, *, max_tokens: int = 50, n: int = 1, **scheduling: object
    ) -> Request:
        """A request waits for an executor."""
        self.num_requests += 1
        request = Request.create(
            name,
            [1 + at % 90 for at in range(prompt)],
            self.drivers[0].make_request(1, max_tokens=max_tokens, ignore_eos=True, n=n).params,
            arrival=self.num_requests,
            seed=0,
            scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
        )
        self.queue.push(request)
        return request

    def dispatch(self) -> list[tuple[str, int]]:
        """What goes where now, by the number of the core."""
        cores = [driver.core for driver in self.drivers]
        given = []
        for request, host, assignment in self.queue.dispatch(
            self.now_ns, cores, None, self.take_back
        ):
            number = next(i for i, core in enumerate(cores) if core is host)
            cores[number].readmit(request)
            given.append((request.request_id, number))
            self.assignments[request.request_id] = assignment
        return given

    def take_back(self, host: Host, name: str) -> None:
        """A request that waits at a core waits for any of them."""
        core = next(driver.core for driver in self.drivers if driver.core is host)
        request = core.withdraw(name)
        assert request is not None
        self.queue.push(request)
        self.taken_back.append(name)

    def step(self) -> list[tuple[str, int]]:
        """Every core makes a step, whose tokens are charged; then what goes where."""
        for driver in self.drivers:
            if driver.plan() is not None:
                events = driver.answer()
                self.queue.charge(events.num_sampled)
        return self.dispatch()

    def end(self, name: str) -> None:
        """A request ends, wherever it runs."""
        ended = [driver.core.abort(name) for driver in self.drivers]
        assert any(ended)
        self.queue.forget(name)


ONE_ROW = {"max_num_seqs": 1}
