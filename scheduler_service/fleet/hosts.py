"""The hosts of the fleet, each with a number of its own, and which can be given requests."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_service.fleet.host_state import ASSUMED_TOKEN_NS, Host, HostState
from scheduler_service.fleet.router import Router


class Hosts:
    """What was seen of each host. Numbers of those that left are used again, the smallest first."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._states: dict[Host, HostState] = {}
        self._noted: dict[Host, None] = {}
        self._num_kinds = 0

    @property
    def all(self) -> Collection[HostState]:
        """All of them."""
        return self._states.values()

    @property
    def by_kind(self) -> dict[int, Host]:
        """One of each kind."""
        return {state.kind: state.host for state in self._states.values()}

    @property
    def num_kinds(self) -> int:
        """How many kinds there ever were."""
        return self._num_kinds

    @property
    def has_open(self) -> bool:
        """Whether some request could begin somewhere now."""
        return any(state.is_open for state in self._states.values())

    @property
    def worth_a_look(self) -> list[HostState]:
        """Those that could begin some request now, or after a step or a few; if any could now."""
        soon = [state for state in self._states.values() if state.is_open_soon]
        return soon if any(state.is_open for state in soon) else []

    def state_of(self, host: Host) -> HostState | None:
        """What was seen of a host; None if it is none of them."""
        return self._states.get(host)

    def keep(self, hosts: Collection[Host]) -> None:
        """From now on it is these."""
        if len(hosts) == len(self._states) and all(host in self._states for host in hosts):
            return
        for host in [known for known in self._states if known not in hosts]:
            self._router.remove(self._states.pop(host))
            self._noted.pop(host, None)
        for host in hosts:
            if host not in self._states:
                taken = {state.number for state in self._states.values()}
                number = next(n for n in range(len(taken) + 1) if n not in taken)
                state = self._states[host] = HostState(host, number, self._kind_of(host))
                self._router.add(state)
                self.note(host)

    def _kind_of(self, host: Host) -> int:
        """That of another host that is the same, or a new one."""
        for state in self._states.values():
            if state.host.config == host.config:
                return state.kind
        self._num_kinds += 1
        return self._num_kinds

    def note(self, host: Host) -> None:
        """Something has changed there."""
        if host in self._states:
            self._noted[host] = None

    def look(self) -> None:
        """Sees how those are now of which something was noted."""
        usual_token_ns: float | None = None
        for host in self._noted:
            state = self._states[host]
            self._router.step_begins(state)
            if usual_token_ns is None and not state.is_measured:
                usual_token_ns = self._usual_token_ns
            self._look_at(state, usual_token_ns or ASSUMED_TOKEN_NS)
        self._noted.clear()

    def look_at(self, state: HostState) -> None:
        """Sees how one is now."""
        self._look_at(state, ASSUMED_TOKEN_NS if state.is_measured else self._usual_token_ns)

    def _look_at(self, state: HostState, usual_token_ns: float) -> None:
        state.look(usual_token_ns)
        self._router.seen(state)

    @property
    def _usual_token_ns(self) -> float:
        known = [state.token_ns for state in self._states.values() if state.is_measured]
        return sum(known) / len(known) if known else ASSUMED_TOKEN_NS
