"""Requests during whose steps executors were lost: tried alone on one executor, then failed.

An executor that is lost accuses the requests that its steps in flight were to compute; which of
them it was, if any, nobody knows. Whoever is accused too often in succession is isolated: it runs
in steps of its own, with nothing else in flight there, and so do all others that are isolated, on
the same executor. Whoever gets as far alone as it got between its latest losses is isolated no
longer. Whoever was alone when one more was lost is failed (docs/adr/0021).

While anybody is isolated, or a request was failed of late, one loss isolates. So several requests
of which executors die cost one executor each, and a few before they are isolated. The last executor
gets no isolated request as long as others may come back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_service.scheduler.engine.engine import Engine
from scheduler_service.scheduler.executor_losses import FleetLosses, Loss, LossCause, RequestLosses
from scheduler_service.scheduler.queue.key_order import expires
from scheduler_service.scheduler.values.request import Request

REASON = "EXECUTOR_LOST_REPEATEDLY"


@dataclass(slots=True)
class Verdict:
    """What follows from a loss: requests that are isolated from now on, and that have failed.

    `excused`: those that were isolated before and are not any more, as another has failed.
    `released`: of these, who waited here, and is to wait with everybody else.
    """

    isolated: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    excused: list[Request] = field(default_factory=list)
    released: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class _Isolated:
    """A request that was isolated, and who has it."""

    request: Request
    host: Engine | None = None

    @property
    def is_on_trial(self) -> bool:
        """Whether its core has not seen enough of it yet."""
        return self.request.trial_size > 0


class Quarantine:
    """Of all executors of a scheduler.

    `max_executor_losses`: in succession, until a request is isolated. `refuses_late`: whether one
    that waits ends when its deadline is past.
    """

    def __init__(self, max_executor_losses: int, *, refuses_late: bool = False) -> None:
        self._max_losses = max_executor_losses
        self._refuses_late = refuses_late
        self._losses: dict[str, RequestLosses] = {}
        self._fleet = FleetLosses()
        self._isolated: dict[str, _Isolated] = {}
        # Until when nobody is given to the last executor; 0: now.
        self._held_until_ns = 0

    def executor_lost(self, requests: Iterable[Request], loss: Loss) -> Verdict:
        """Judges what an executor had that was lost. Mutates the requests that it names.

        Who was recalled from it too late is accused as well; it is not among `requests`.
        """
        verdict = Verdict()
        requests = list(requests)
        for request in requests:
            if request.request_id in self._isolated:
                # What the executor had of it says nothing any more, be it that it was acquitted.
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
        # Who was isolated a moment ago was never tried.
        verdict.excused = [r for r in excused if r not in verdict.isolated]
        verdict.isolated = [r for r in verdict.isolated if r not in excused]
        return verdict

    def _losses_of(self, request: Request) -> RequestLosses:
        return self._losses.setdefault(request.request_id, RequestLosses())

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._losses.pop(request_id, None)
        self._isolated.pop(request_id, None)

    def _note_loss(self, request: Request, loss: Loss, *, is_alone: bool) -> None:
        losses = self._losses_of(request)
        if not self._is_isolated(request.request_id):
            losses.num_alone = 0  # it came through, or has not been tried
        losses.add(self._fleet.num_losses, loss, _num_output_tokens(request), is_alone=is_alone)

    def _judge(
        self, request: Request, verdict: Verdict, loss: Loss, num_until_isolated: int
    ) -> None:
        """Fails or isolates a request after a loss, or leaves it among others."""
        request_id = request.request_id
        losses = self._losses_of(request)
        is_isolated = self._is_isolated(request_id)
        if self._is_guilty(request_id, losses, loss.now_ns):
            self._fail(request, losses, loss.now_ns)
            verdict.failed.append(request)
        elif len(losses.in_succession) >= num_until_isolated:
            # It may have come further than was heard: a token with each step in flight.
            least = losses.num_trials if is_isolated else 2 * losses.num_trials
            losses.num_trials = max(losses.num_gained + loss.num_steps, least)
            request.trial_size, request.num_trials_left = 1, losses.num_trials
            self._isolated[request_id] = _Isolated(request)
            if not is_isolated:
                verdict.isolated.append(request)

    def _num_until_isolated(self, loss: Loss) -> int:
        """Losses in succession. One that is certain suffices where others are suspects already."""
        is_certain = loss.cause is LossCause.DIED
        is_alert = bool(self._isolated) or self._fleet.is_proven(loss.now_ns)
        return 1 if is_certain and is_alert else self._max_losses

    def _is_guilty(self, request_id: str, losses: RequestLosses, now_ns: int) -> bool:
        """Whether it was alone often enough when executors were lost."""
        num_losses = len(losses.in_succession)
        is_chance = losses.any_silent or self._fleet.is_storm(now_ns, request_id)
        if not is_chance and self._fleet.is_proven(now_ns) and num_losses > 1:
            return losses.num_alone > losses.num_alone_allowed(is_storm=False)
        # Losses for which other suspects may account say nothing of chance.
        is_storm = losses.any_silent or self._fleet.is_storm(now_ns, request_id, self._isolated)
        is_alone = losses.num_alone > losses.num_alone_allowed(is_storm=is_storm)
        return is_alone and num_losses > self._max_losses

    def _fail(self, request: Request, losses: RequestLosses, now_ns: int) -> None:
        is_all_explained = self._fleet.explain(request.request_id, now_ns)
        self._isolated.pop(request.request_id, None)
        message = (
            f"{len(losses.in_succession)} executors were lost while they computed it, "
            f"{losses.num_alone} of them with nothing else to compute"
        )
        request.fail_unscheduled(REASON, message)
        if is_all_explained:
            self._excuse_others(losses.in_succession)

    def _excuse_others(self, numbers: Collection[int]) -> None:
        """These losses are explained: who was isolated for them need not be tried any more."""
        for request_id, losses in self._losses.items():
            losses.explain(numbers)
            isolated = self._isolated.get(request_id)
            is_waiting = isolated is not None and isolated.host is None
            if isolated is not None and is_waiting and len(losses.in_succession) < self._max_losses:
                isolated.request.trial_size = isolated.request.num_trials_left = 0

    # -- who goes where ------------------------------------------------------------------------

    def holds(self, request: Request) -> bool:
        """Whether a request that no host has waits here, and nowhere else."""
        return self._keeps(request.request_id)

    def _keeps(self, request_id: str) -> bool:
        isolated = self._isolated.get(request_id)
        return isolated is not None and isolated.host is None

    @property
    def num_waiting(self) -> int:
        """Requests that no host has."""
        return sum(isolated.host is None for isolated in self._isolated.values())

    @property
    def next_look_ns(self) -> int | None:
        """When `take_overdue` or `dispatch` has something to do, if nothing happens before."""
        times = [at_ns for at_ns, _ in self._expiring]
        if self._held_until_ns and self.num_waiting:
            times.append(self._held_until_ns)
        return min(times, default=None)

    @property
    def is_holding(self) -> bool:
        """Whether who waits here waits for executors that may come back."""
        return self._held_until_ns > 0

    def to_recall(self, hosts: Sequence[Engine], now_ns: int) -> list[tuple[str, Engine]]:
        """Isolated requests to be withdrawn from `hosts`, all that there are, and `recalled`.

        The last executor is not to die of them while others are on their way back.
        """
        is_last = len(hosts) == 1
        self._held_until_ns = self._fleet.return_expected_until_ns(now_ns) if is_last else 0
        if not self.is_holding:
            return []
        self._release()
        (last,) = hosts
        return [(name, last) for name, each in self._isolated.items() if each.host is last]

    def recalled(self, request: Request) -> None:
        """No host has an isolated request any more, as its host gave it back."""
        self._isolated[request.request_id] = _Isolated(request)

    def take_overdue(self, now_ns: int) -> Iterator[Request]:
        """As that of the queue, of those that wait here."""
        overdue = [request for at_ns, request in self._expiring if at_ns < now_ns]
        for request in overdue[:MAX_OVERDUE]:
            yield end_overdue(request, now_ns)

    @property
    def _expiring(self) -> Iterator[tuple[int, Request]]:
        """Those that wait here and end by themselves, and when."""
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
        """Those that no host has, and the hosts that get them, whatever these have begun.

        It is one host for all; another only for who does not fit there, or `avoids` it while
        there is another.
        """
        waiting = [isolated for isolated in self._isolated.values() if isolated.host is None]
        if not waiting or self.to_recall(hosts, now_ns) or self.is_holding:
            return
        # Who is suspected most is tried first: its guilt may explain the losses of others.
        waiting.sort(key=self._turn)
        for isolated in waiting:
            if not self.holds(isolated.request):
                continue  # it has ended while others were given away
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
        """Smaller is tried first."""
        losses = self._losses_of(isolated.request)
        return -len(losses.in_succession), isolated.request.arrival

    def _is_isolated(self, request_id: str) -> bool:
        isolated = self._isolated.get(request_id)
        return isolated is not None and isolated.is_on_trial

    def _release(self) -> list[Request]:
        """Forgets those of which enough was seen; returns those of them that no host has."""
        released = [each for each in self._isolated.values() if not each.is_on_trial]
        for isolated in released:
            del self._isolated[isolated.request.request_id]
        return [isolated.request for isolated in released if isolated.host is None]


def _num_output_tokens(request: Request) -> int:
    """Of its longest sequence that goes on."""
    return max((s.num_output_tokens for s in request.unfinished), default=0)


# -- Requests that no host has, and whose deadline is past -----------------------------------------

# How many are ended in one go.
MAX_OVERDUE = 32


def end_overdue(request: Request, now_ns: int) -> Request:
    """Ends it, by name."""
    late_s = (now_ns - (request.scheduling.deadline_ns or 0)) / 1e9
    message = f"it waited for an executor until {late_s:.3f} s after its deadline"
    request.fail_unscheduled("DEADLINE_UNREACHABLE", message)
    return request
