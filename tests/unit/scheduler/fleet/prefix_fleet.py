"""Cores that have computed some prompts, with a router of prefixes before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_service.assignment import Assignment
from scheduler_service.core.request import Request, SchedulingParams
from scheduler_service.fleet.fleet_queue import FleetQueue
from tests.support.core.driver import CoreDriver

# 40 tokens of the same beginning, and what follows.
SYSTEM = list(range(1, 41))
STEP_US = 64_000
TOKEN_NS = 1_000_000


class PrefixFleet:
    """Cores of the same kind, or with these changes, that computed a step of 64 tokens in 64 ms."""

    def __init__(self, *changes: Mapping[str, int], speeds: Sequence[int] = ()) -> None:
        pool: dict[str, Any] = {"num_device_blocks": 256}
        self.drivers = [CoreDriver(**(pool | dict(each))) for each in changes]
        self.queue = FleetQueue("fcfs", {})
        self.now_ns = 0
        self.num_requests = 0
        self.assignments: dict[str, Assignment] = {}
        for index, driver in enumerate(self.drivers):
            driver.add([90 + index] * 70, max_tokens=1)
            while driver.plan() is not None:
                driver.answer(compute_us=STEP_US * (speeds[index] if speeds else 1))

    def push(self, prompt: list[int], **scheduling: object) -> Request:
        self.num_requests += 1
        request = CoreDriver().make_request(
            prompt,
            f"r{self.num_requests}",
            scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
            max_tokens=50,
            ignore_eos=True,
        )
        request.arrival = self.num_requests
        self.queue.push(request)
        return request

    def dispatch(self) -> dict[str, int]:
        """What goes where now."""
        cores = [driver.core for driver in self.drivers]
        given = {}
        for request, host, assignment in self.queue.dispatch(self.now_ns, cores):
            number = next(i for i, core in enumerate(cores) if core is host)
            cores[number].readmit(request)
            given[request.request_id] = number
            self.assignments[request.request_id] = assignment
        return given

    def compute(self, number: int, prompt: list[int]) -> None:
        """An executor has the blocks of a prompt, and nobody runs there."""
        self.drivers[number].add(prompt, max_tokens=1)
        while self.drivers[number].plan() is not None:
            self.drivers[number].answer(compute_us=STEP_US)

    def begin(self, number: int, prompt: list[int]) -> None:
        """An executor computes a prompt that takes more than a step."""
        self.drivers[number].add(prompt, max_tokens=60)
        self.drivers[number].plan()


LONG = [1 + at % 90 for at in range(160)]


class BusyHolder(PrefixFleet):
    """The first executor has a long prefix, and prompts for all of the next step."""

    def __init__(self) -> None:
        super().__init__({"max_num_seqs": 32}, {"max_num_seqs": 32})
        self.compute(0, LONG)
        self.begin(0, [88] * 128)

    def open_holder(self) -> None:
        """The prompt is computed."""
        while self.drivers[0].in_flight:
            self.drivers[0].answer(compute_us=STEP_US)
            if self.drivers[0].core.openings.num_pending_tokens:
                self.drivers[0].plan()
