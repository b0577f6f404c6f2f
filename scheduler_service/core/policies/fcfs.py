"""First come, first served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from scheduler_service.core.policies.request_queue import (
    BEFORE_ALL,
    Key,
    LaneOf,
    Lanes,
    OrderedQueue,
    all_lanes,
    lane_of_adapter,
)
from scheduler_service.core.request import Request


class FcfsPolicy:
    """The order of arrival. Nobody is preempted for somebody who waits."""

    charges_outputs = False
    allows_bypasses = False
    refuses_late = False
    shares = None

    def __init__(self, lane_of: LaneOf = lane_of_adapter) -> None:
        self._lane_of = lane_of
        self._waiting: OrderedQueue[Request] = OrderedQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        pass

    def has_place(self, tenant: str, num_places: int) -> bool:
        return len(self) < num_places

    def push(self, request: Request) -> None:
        self._waiting.add(request, {self._lane_of(request): self.rank(request)})

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def change_lane(self, request: Request) -> None:
        self._waiting.change_lane(request, self._lane_of(request))

    def candidates(
        self, now_ns: int = 0, open_lanes: Callable[[], Lanes] = all_lanes
    ) -> Iterator[Request]:
        key = BEFORE_ALL
        while (entry := self._waiting.after(key, open_lanes())) is not None:
            key, request = entry
            yield request

    @property
    def next_deadline_ns(self) -> int | None:
        return None

    def ended(self, request_id: str) -> None:
        pass

    def overdue(self, now_ns: int) -> Request | None:
        return None

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        pass

    def sampled(self, tenant: str, num_tokens: int) -> None:
        pass

    def rank(self, request: Request) -> Key:
        return (request.arrival,)

    def urgency(self, request: Request) -> Key:
        return ()

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return False

    def may_pass(self, request: Request, other: Request) -> bool:
        return False
