"""The executor at which a request has its first token soonest: longest cached prefix against load.

Where costs are alike, requests that go on alike choose the same host, by rendezvous hashing
(Thaler and Ravishankar 1998): so prompts of a family meet where the first of them was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scheduler_service.core.request import Request
from scheduler_service.fleet.host_costs import HostCosts
from scheduler_service.fleet.host_state import HostState
from scheduler_service.fleet.prefix_index import Prefixes, PrefixIndex
from scheduler_service.fleet.router import Choice

# Costs that differ by no more than so many tokens, or so much of them, are alike.
_ALIKE_TOKENS = 8
_ALIKE_RATIO = 1.02
_WORD = 2**64
# Odd, without a pattern: what differs in a bit is far apart afterwards.
_MIX = 0xBF58476D1CE4E5B9


class PrefixRouter:
    """Ranks hosts by the time until a first token there."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._costs = HostCosts()

    def add(self, state: HostState) -> None:
        device, host = state.host.pools
        self._index.add(state.number, state.host.config, device, host)
        self._costs.seen(state)

    def remove(self, state: HostState) -> None:
        self._index.remove(state.number)

    def given(self, state: HostState, request: Request) -> None:
        if request.unfinished:
            self._index.expect(state.number, request)

    def step_begins(self, state: HostState) -> None:
        self._index.settle(state.number)

    def seen(self, state: HostState) -> None:
        self._costs.seen(state)

    def find(self, request: Request) -> Prefixes:
        return self._index.find(request) if request.unfinished else Prefixes()

    def rank(
        self, request: Request, states: Sequence[HostState], prefixes: Prefixes
    ) -> Iterator[Choice]:
        if not states:
            return
        if not request.unfinished:
            yield from map(Choice, states)
            return
        cached = dict(zip(prefixes.numbers, prefixes.num_tokens, strict=True))
        in_host_pool: dict[int, int] = {}
        if any(prefixes.num_host_blocks):
            in_host_pool = dict(zip(prefixes.numbers, prefixes.num_host_blocks, strict=True))
        costs_ns = self._costs.of(request, states, cached, in_host_pool)
        first = _first(states, costs_ns, prefixes.family)
        yield _choice(states[first], costs_ns[first], cached)
        for index in sorted(range(len(states)), key=costs_ns.__getitem__):
            if index != first:
                yield _choice(states[index], costs_ns[index], cached)


def are_alike(choice: Choice, other: Choice) -> bool:
    """Whether nothing but the family of a request speaks for one or the other."""
    least, most = sorted((choice, other), key=lambda each: each.cost_ns)
    return most.cost_ns <= _limit_ns(least.cost_ns, least.state)


def _choice(state: HostState, cost_ns: float, cached: Mapping[int, int]) -> Choice:
    return Choice(state, cost_ns, cached.get(state.number, 0))


def _first(states: Sequence[HostState], costs_ns: Sequence[float], family: int) -> int:
    """The best one; of those that are alike, the one that a family of requests has in common."""
    least_ns = min(costs_ns)
    least = costs_ns.index(least_ns)
    limit_ns = _limit_ns(least_ns, states[least])
    alike = [index for index, cost_ns in enumerate(costs_ns) if cost_ns <= limit_ns]
    if len(alike) == 1:
        return least
    return max(alike, key=lambda index: (family ^ states[index].salt) * _MIX % _WORD)


def _limit_ns(least_ns: float, state: HostState) -> float:
    """What costs no more than this is like what costs `least_ns` at `state`."""
    return max(least_ns * _ALIKE_RATIO, least_ns + _ALIKE_TOKENS * state.token_ns)
