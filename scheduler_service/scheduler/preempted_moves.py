"""Moves of preempted requests to other executors."""

from __future__ import annotations

from collections.abc import Collection, Container

from scheduler_service.scheduler.executor_state import ExecutorState
from scheduler_service.scheduler.queue import WaitingQueue
from scheduler_service.scheduler.routing import Routing
from scheduler_service.scheduler.values import Request

# Least time in ns for which a preempted request waits for its own executor before it may move.
_LEAST_PATIENCE_NS = 10_000_000


class PreemptedMoves:
    """Chooses preempted requests that should rather begin at another executor.

    `givers`: executors with preempted requests, by address. `next_at_ns`: earliest time in ns at
    which one of these requests has waited long enough to move, if nothing happens before; None for
    never.
    """

    def __init__(self, queue: WaitingQueue, routing: Routing) -> None:
        self._queue = queue
        self._routing = routing
        self.givers: dict[str, ExecutorState] = {}
        self.next_at_ns: int | None = None

    def planned(self, executor: ExecutorState) -> None:
        """Updates `givers` after an executor has planned a step."""
        if executor.engine.num_preempted:
            self.givers[executor.address] = executor
        else:
            self.givers.pop(executor.address, None)

    def choose(
        self,
        executors: Collection[ExecutorState],
        now_ns: int,
        planning: Container[ExecutorState] = (),
    ) -> tuple[ExecutorState, Request] | None:
        """Returns an executor and its preempted request that is to move to the waiting queue.

        None if no request is to move. A waiting request that may begin before the preempted one has
        precedence. `executors`: executors that take requests. `planning`: executors that are about
        to plan a step; while they have room they resume their own preempted requests. Sets
        `next_at_ns`.
        """
        self.next_at_ns = None
        if not self.givers:
            return None
        takers = [
            executor
            for executor in executors
            if executor.address not in self.givers and self._routing.has_room(executor)
        ]
        first = self._routing.first_of(takers)
        for giver in self.givers.values() if takers else ():
            if giver in planning and giver.engine.has_room:
                continue
            for request in giver.engine.movable_requests:
                if first is not None and self._queue.may_go_before(first, request):
                    continue
                if self._may_move(request, takers, now_ns):
                    return giver, request
        return None

    def _may_move(self, request: Request, takers: list[ExecutorState], now_ns: int) -> bool:
        """Returns whether a request may move to one of `takers` now; else lowers `next_at_ns`."""
        for taker in takers:
            if not taker.engine.has_room_for(request):
                continue
            at_ns = _moves_at_ns(request, taker)
            if now_ns >= at_ns:
                return True
            self.next_at_ns = min(at_ns, self.next_at_ns or at_ns)
        return False


def _moves_at_ns(request: Request, taker: ExecutorState) -> int:
    """Returns the time in ns from which a preempted request may move to `taker`.

    The request's own executor still has some of its KV. So the request waits there for as long as
    `taker` would need to recompute it. It loses at most twice what the best choice would (ski
    rental).
    """
    num_tokens = sum(len(sequence.token_ids) for sequence in request.unfinished)
    return request.queued_at_ns + max(_LEAST_PATIENCE_NS, taker.engine.recompute_ns(num_tokens))
