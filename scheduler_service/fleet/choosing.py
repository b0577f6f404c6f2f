"""Which host a request begins at now, why it is that one, or why it is none yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler_service.assignment import AssignedFor, Assignment
from scheduler_service.core.admission_blocker import AdmissionBlocker
from scheduler_service.core.queue.tenant_shares import TenantShares
from scheduler_service.core.request import Request
from scheduler_service.fleet.holds import Holds
from scheduler_service.fleet.host_state import HostState
from scheduler_service.fleet.hosts import Hosts
from scheduler_service.fleet.passed import Waits
from scheduler_service.fleet.prefix_router import are_alike
from scheduler_service.fleet.router import Choice, Router

# What passes by itself, or is for others, is not waited for at a host.
_AWAITED_AT_A_HOST = frozenset(
    {
        AdmissionBlocker.BLOCKS,
        AdmissionBlocker.ROWS,
        AdmissionBlocker.BYTES,
        AdmissionBlocker.ADAPTER_SLOT,
    }
)
_US_NS = 1000


class Place(NamedTuple):
    """A host for a request, and why it. `elsewhere`: the next best, or a better one."""

    choice: Choice
    why: AssignedFor
    elsewhere: Choice | None = None

    def assignment(self, num_cached: int) -> Assignment:
        """For those who watch, before the host is given the request, of which so much is cached."""
        host, elsewhere = self.choice.state.host, self.elsewhere
        is_compared = elsewhere is not None
        return Assignment(
            self.why,
            num_cached,
            host.openings.num_pending_tokens,
            host.num_running,
            int(self.choice.cost_ns) // _US_NS if is_compared else None,
            None if elsewhere is None else elsewhere.num_cached,
            None if elsewhere is None else int(elsewhere.cost_ns) // _US_NS,
        )


class Choosing:
    """Compares the hosts that could begin a request, and has it wait for better ones."""

    def __init__(
        self, hosts: Hosts, holds: Holds, router: Router, shares: TenantShares | None
    ) -> None:
        """`shares`: what tenants may take of the fleet; None for whatever there is."""
        self._hosts = hosts
        self._shares = shares
        self._holds = holds
        self._router = router
        # By request, of hosts that lacked blocks for it: how many they had.
        self._lacking: dict[str, dict[HostState, int]] = {}

    def tick(self, now_ns: int) -> None:
        """Takes note of the time."""
        self._holds.end(now_ns)
        if self._shares is not None:
            self._shares.now_ns = now_ns

    def forget(self, request_id: str) -> None:
        """It waits no more."""
        self._lacking.pop(request_id, None)
        self._holds.forget(request_id)

    def choose(self, request: Request, now_ns: int) -> Place | Waits:
        """Who gets a request now, or why it waits."""
        is_open_to = [s.host.openings.is_open_to(request) for s in self._hosts.all if s.is_open]
        if is_open_to and not any(is_open_to):
            # Its tenant has what it may have, which is known without comparing hosts.
            return self._where_others_yield(request) or Waits.FOR_ROOM
        states = self._fitting(request)
        open_states = [state for state in states if state.is_open]
        if not open_states:
            return self._where_others_yield(request) or Waits.FOR_ONE_THAT_IT_FITS
        found: Place | Waits | None = None
        if any(self._is_hopeful(request, state) for state in open_states):
            found = self._best(request, states, now_ns)
        return found or self._where_others_yield(request) or self._awaited(request, open_states)

    def _fitting(self, request: Request) -> list[HostState]:
        states = self._hosts.worth_a_look
        hosts = {state.kind: state.host for state in states}
        kinds = {kind for kind, host in hosts.items() if host.fits(request)}
        return [state for state in states if state.kind in kinds]

    def _is_hopeful(self, request: Request, state: HostState) -> bool:
        """Whether it is worth asking a host that may have lacked blocks for a request."""
        num_blocks = self._lacking.get(request.request_id, {}).get(state)
        return num_blocks is None or state.num_blocks_left > num_blocks or state.is_idle

    def _best(
        self, request: Request, states: Sequence[HostState], now_ns: int
    ) -> Place | Waits | None:
        """Where a request begins now, or for whom it had better wait."""
        busy: Choice | None = None
        without_room: Choice | None = None
        ranked = self._router.rank(request, states)
        for choice in ranked:
            state = choice.state
            if not state.is_open:
                busy = busy or choice
                continue
            lack = state.host.openings.what_lacks(request)
            if lack is None and self._takes_the_last(request, state):
                continue
            if lack is None:
                if busy and self._holds.begins(request, choice.cost_ns, busy.cost_ns, now_ns):
                    return Waits.FOR_ONE_THAT_IS_BUSY
                better = busy or without_room
                if better is None:
                    return _as_ranked(choice, next(ranked, None))
                return Place(choice, self._why_not(request, is_busy=busy is not None), better)
            without_room = without_room or choice
            lacking = self._lacking.setdefault(request.request_id, {})
            if lack is AdmissionBlocker.BLOCKS:
                lacking[state] = state.num_blocks_left
            else:
                lacking.pop(state, None)
        return None

    def _takes_the_last(self, request: Request, state: HostState) -> bool:
        """Whether the last host with room for other tenants would be left to one.

        A tenant that has nothing at other hosts may take any, so that nobody waits for ever.
        """
        if self._shares is None or not self._shares.is_shared:
            return False
        if not state.host.openings.takes_over(request):
            return False
        others = [each for each in self._hosts.all if each is not state]
        tenant = request.scheduling.tenant
        # Where somebody waits for room, nobody may find any later.
        has_room = any(each.is_open and not each.is_waited_at for each in others)
        return not has_room and any(each.host.openings.has_requests_of(tenant) for each in others)

    def _why_not(self, request: Request, *, is_busy: bool) -> AssignedFor:
        """Why it is not given to the best one."""
        if not is_busy:
            return AssignedFor.BETTER_LACKS_ROOM
        has_waited = self._holds.has_begun(request.request_id)
        return AssignedFor.WAITED_LONG_ENOUGH if has_waited else AssignedFor.BETTER_IS_BUSY

    def _awaited(self, request: Request, states: Sequence[HostState]) -> Place | Waits:
        """A host where a request waits for what it lacks, with nobody before it."""
        free = [state for state in states if state.host.openings.nobody_waits]
        for choice in self._router.rank(request, free):
            if self._takes_the_last(request, choice.state):
                continue
            if choice.state.host.openings.what_lacks(request) in _AWAITED_AT_A_HOST:
                return Place(choice, AssignedFor.NO_ROOM_ANYWHERE)
        return Waits.FOR_ROOM

    def _where_others_yield(self, request: Request) -> Place | None:
        yielding = [s for s in self._hosts.all if s.host.openings.may_yield_to(request)]
        for choice in self._router.rank(request, yielding):
            host = choice.state.host
            if host.fits(request):
                host.openings.yields_to(request)
                return Place(choice, AssignedFor.OTHERS_YIELD)
        return None


def _as_ranked(best: Choice, next_best: Choice | None) -> Place:
    """Nothing kept a request from the best one."""
    if next_best is None:
        why = AssignedFor.ONLY_ONE
    elif are_alike(best, next_best):
        why = AssignedFor.AS_GOOD
    elif best.num_cached > next_best.num_cached:
        why = AssignedFor.MOST_CACHED
    else:
        why = AssignedFor.SOONEST
    return Place(best, why, next_best)
