"""Quarantine of requests during whose steps executors were lost: trials alone, then failure.

A lost executor accuses the requests that its steps in flight were to compute; nobody knows which of
them caused the loss, if any did. A request that is accused too often in succession is isolated: it
runs in steps of its own, with nothing else in flight at its executor. All isolated requests share
one executor. A request that gets as far alone as it got between its latest losses is isolated no
longer. A request that ran alone when one more executor was lost fails (docs/adr/0019).

While some request is isolated, or a request was failed recently, a single loss isolates. So several
requests of which executors die cost one executor each, and a few executors before they are
isolated. The last executor gets no isolated request as long as other executors may come back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.executor_losses import FleetLosses, Loss, LossCause, RequestLosses
from scheduler_service.scheduler.queue import expires
from scheduler_service.scheduler.values import Request

QUARANTINE_REASON = "EXECUTOR_LOST_REPEATEDLY"


@dataclass(slots=True)
class QuarantineDecision:
    """Consequences of a loss: requests that are isolated from now on, and requests that failed.

    `excused`: requests that were isolated and no longer are, as another request was failed.
    `released`: excused requests that waited in quarantine, and are to return to the waiting queue.
    """

    isolated: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    excused: list[Request] = field(default_factory=list)
    released: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class _Isolated:
    """Isolated request, and the engine that has it (`host`; None while it waits in quarantine)."""

    request: Request
    host: Engine | None = None

    @property
    def is_on_trial(self) -> bool:
        """True until the trials of the request end."""
        return self.request.trial_size > 0


class Quarantine:
    """Quarantine of a scheduler, for all of its executors.

    `max_executor_losses`: losses in succession after which a request is isolated. `refuses_late`:
    whether a request that waits in quarantine ends once its deadline is past.
    """

    def __init__(self, max_executor_losses: int, *, refuses_late: bool = False) -> None:
        self._max_losses = max_executor_losses
        self._refuses_late = refuses_late
        self._losses: dict[str, RequestLosses] = {}
        self._fleet = FleetLosses()
        self._isolated: dict[str, _Isolated] = {}
        # Time in ns until which the last executor gets no isolated request; 0 for no such hold.
        self._held_until_ns = 0

    def executor_lost(self, requests: Iterable[Request], loss: Loss) -> QuarantineDecision:
        """Judges the requests of a lost executor; returns the verdict.

        Mutates the requests it names.

        Also accuses requests that were recalled from the executor too late, which are not in
        `requests`.
        """
        verdict = QuarantineDecision()
        requests = list(requests)
        for request in requests:
            if request.request_id in self._isolated:
                # Whatever the executor did with the request is void, even an acquittal.
                self._isolated[request.request_id] = _Isolated(request)
        self._release()
        if loss.cause.says_nothing:
            return verdict
        in_flight = [r for r in requests if r.was_in_flight and not r.is_finished]
        names = {request.request_id for request in in_flight}.union(loss.in_flight)
        come_back = {request.request_id for request in requests}
        recalled = [name for name in sorted(names - come_back) if self._keeps(name)]
        in_flight += [self._isolated[name].request for name in recalled]
        accused = [r for r in in_flight if not self._losses_of(r).is_repeated(loss)]
        if in_flight and not accused:
            return verdict
        self._fleet.add(loss, frozenset(names))
        num_until_isolated = self._num_until_isolated(loss)
        for request in accused:
            self._note_loss(request, loss, is_alone=len(names) == 1)
            self._judge(request, verdict, loss, num_until_isolated)
        excused = self._release()
        verdict.released = [r for r in excused if r.request_id not in come_back]
        # A request isolated by this very loss was never tried.
        verdict.excused = [r for r in excused if r not in verdict.isolated]
        verdict.isolated = [r for r in verdict.isolated if r not in excused]
        return verdict

    def _losses_of(self, request: Request) -> RequestLosses:
        return self._losses.setdefault(request.request_id, RequestLosses())

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self._losses.pop(request_id, None)
        self._isolated.pop(request_id, None)

    def _note_loss(self, request: Request, loss: Loss, *, is_alone: bool) -> None:
        losses = self._losses_of(request)
        if not self._is_isolated(request.request_id):
            losses.num_alone = 0  # acquitted, or never tried
        losses.add(self._fleet.num_losses, loss, _num_output_tokens(request), is_alone=is_alone)

    def _judge(
        self, request: Request, verdict: QuarantineDecision, loss: Loss, num_until_isolated: int
    ) -> None:
        """Fails or isolates an accused request, or leaves it among other requests."""
        request_id = request.request_id
        losses = self._losses_of(request)
        is_isolated = self._is_isolated(request_id)
        if self._is_guilty(request_id, losses, loss.now_ns):
            self._fail(request, losses, loss.now_ns)
            verdict.failed.append(request)
        elif len(losses.in_succession) >= num_until_isolated:
            # The request may be further than its results show: by a token for each step in flight.
            least = losses.num_trials if is_isolated else 2 * losses.num_trials
            losses.num_trials = max(losses.num_gained + loss.num_steps, least)
            request.trial_size, request.num_trials_left = 1, losses.num_trials
            self._isolated[request_id] = _Isolated(request)
            if not is_isolated:
                verdict.isolated.append(request)

    def _num_until_isolated(self, loss: Loss) -> int:
        """Returns the number of losses in succession that isolate a request.

        One certain loss suffices while other requests are suspects already.
        """
        is_certain = loss.cause is LossCause.DIED
        is_alert = bool(self._isolated) or self._fleet.is_proven(loss.now_ns)
        return 1 if is_certain and is_alert else self._max_losses

    def _is_guilty(self, request_id: str, losses: RequestLosses, now_ns: int) -> bool:
        """Returns whether enough executors were lost while the request ran alone."""
        num_losses = len(losses.in_succession)
        is_chance = losses.any_silent or self._fleet.is_storm(now_ns, request_id)
        if not is_chance and self._fleet.is_proven(now_ns) and num_losses > 1:
            return losses.num_alone > losses.num_alone_allowed(is_storm=False)
        # Losses that other suspects may have caused do not make chance more likely.
        is_storm = losses.any_silent or self._fleet.is_storm(now_ns, request_id, self._isolated)
        is_alone = losses.num_alone > losses.num_alone_allowed(is_storm=is_storm)
        return is_alone and num_losses > self._max_losses

    def _fail(self, request: Request, losses: RequestLosses, now_ns: int) -> None:
        is_all_explained = self._fleet.explain(request.request_id, now_ns)
        self._isolated.pop(request.request_id, None)
        message = (
            f"{len(losses.in_succession)} executors in a row failed while computing this request, "
            f"{losses.num_alone} of them without any other request"
        )
        request.fail_unscheduled(QUARANTINE_REASON, message)
        if is_all_explained:
            self._excuse_others(losses.in_succession)

    def _excuse_others(self, numbers: Collection[int]) -> None:
        """Drops explained losses of all requests, and releases requests cleared by that.

        Only requests that wait in quarantine are released.
        """
        for request_id, losses in self._losses.items():
            losses.explain(numbers)
            isolated = self._isolated.get(request_id)
            is_waiting = isolated is not None and isolated.host is None
            if isolated is not None and is_waiting and len(losses.in_succession) < self._max_losses:
                isolated.request.trial_size = isolated.request.num_trials_left = 0

    # -- placement of isolated requests --------------------------------------------------------

    def holds(self, request: Request) -> bool:
        """Returns whether a request waits in quarantine, without a host."""
        return self._keeps(request.request_id)

    def _keeps(self, request_id: str) -> bool:
        isolated = self._isolated.get(request_id)
        return isolated is not None and isolated.host is None

    @property
    def num_waiting(self) -> int:
        """Number of isolated requests without a host."""
        return sum(isolated.host is None for isolated in self._isolated.values())

    @property
    def next_look_ns(self) -> int | None:
        """Time in ns at which `take_overdue` or `dispatch` is due without an event; else None."""
        times = [at_ns for at_ns, _ in self._expiring]
        if self._held_until_ns and self.num_waiting:
            times.append(self._held_until_ns)
        return min(times, default=None)

    @property
    def is_holding(self) -> bool:
        """Whether waiting requests are held back until lost executors may have returned."""
        return self._held_until_ns > 0

    def to_recall(self, hosts: Sequence[Engine], now_ns: int) -> list[tuple[str, Engine]]:
        """Returns the isolated requests to withdraw from `hosts`, all engines there are.

        Each request comes with its engine. The caller reports a withdrawn request to `recalled`.
        Only a last host is concerned: it must not die of an isolated request while other executors
        may come back. Updates `is_holding`.
        """
        is_last = len(hosts) == 1
        self._held_until_ns = self._fleet.return_expected_until_ns(now_ns) if is_last else 0
        if not self.is_holding:
            return []
        self._release()
        (last,) = hosts
        return [(name, last) for name, each in self._isolated.items() if each.host is last]

    def recalled(self, request: Request) -> None:
        """Notes that the host gave an isolated request back; the request has no host now."""
        self._isolated[request.request_id] = _Isolated(request)

    def take_overdue(self, now_ns: int) -> Iterator[Request]:
        """Ends and yields requests waiting here whose deadline is past, at most MAX_OVERDUE."""
        overdue = [request for at_ns, request in self._expiring if at_ns < now_ns]
        for request in overdue[:MAX_OVERDUE]:
            yield end_overdue(request, now_ns)

    @property
    def _expiring(self) -> Iterator[tuple[int, Request]]:
        """Deadline in ns and request, of requests waiting here that end at their deadline."""
        if not self._refuses_late:
            return
        for request in (each.request for each in self._isolated.values() if each.host is None):
            deadline_ns = request.scheduling.deadline_ns
            if deadline_ns is not None and expires(request):
                yield deadline_ns, request

    def dispatch(
        self,
        hosts: Sequence[Engine],
        now_ns: int,
        avoids: Callable[[Request, Engine], bool] = lambda _request, _host: False,
    ) -> Iterator[tuple[Request, Engine]]:
        """Yields each waiting request with the host that gets it, whatever runs there.

        All isolated requests get the same host. Another host is used only for a request that does
        not fit there, or that `avoids` it while another host fits.
        """
        waiting = [isolated for isolated in self._isolated.values() if isolated.host is None]
        if not waiting or self.to_recall(hosts, now_ns) or self.is_holding:
            return
        # The most suspected request is tried first: its guilt may explain the losses of others.
        waiting.sort(key=self._turn)
        for isolated in waiting:
            if not self.holds(isolated.request):
                continue  # it ended while the caller placed another request
            self._release()
            wards = {other.host for other in self._isolated.values()}
            fitting = [host for host in hosts if host.fits(isolated.request)]
            others = [host for host in fitting if not avoids(isolated.request, host)]
            isolated.host = min(
                others or fitting,
                key=lambda host: (host not in wards, host.num_unfinished_tokens),
                default=None,
            )
            if isolated.host is not None:
                yield isolated.request, isolated.host

    def _turn(self, isolated: _Isolated) -> tuple[int, int]:
        """Returns the sort key of a trial; the smallest is tried first."""
        losses = self._losses_of(isolated.request)
        return -len(losses.in_succession), isolated.request.arrival

    def _is_isolated(self, request_id: str) -> bool:
        isolated = self._isolated.get(request_id)
        return isolated is not None and isolated.is_on_trial

    def _release(self) -> list[Request]:
        """Drops requests whose trials are over; returns those of them without a host."""
        released = [each for each in self._isolated.values() if not each.is_on_trial]
        for isolated in released:
            del self._isolated[isolated.request.request_id]
        return [isolated.request for isolated in released if isolated.host is None]


def _num_output_tokens(request: Request) -> int:
    """Returns the number of output tokens of the longest unfinished sequence; 0 without any."""
    return max((s.num_output_tokens for s in request.unfinished), default=0)


# -- Overdue requests: waiting, and past their deadline --------------------------------------------

# Most overdue requests of the queue, and as many of the quarantine, that one tick ends.
MAX_OVERDUE = 32


def end_overdue(request: Request, now_ns: int) -> Request:
    """Ends an overdue request with DEADLINE_UNREACHABLE; returns the request."""
    late_s = (now_ns - (request.scheduling.deadline_ns or 0)) / 1e9
    message = f"the request waited for an executor until {late_s:.3f} s after its deadline"
    request.fail_unscheduled("DEADLINE_UNREACHABLE", message)
    return request
