"""The executor at which a request has its first token soonest: longest cached prefix against load.

The cost of a host is the time of what is computed there before the first token: what waits there
already, and what of the request is not cached. What is in the host pool has to be brought back; who
runs there shares every step; blocks that are taken from a full pool are computed again by somebody;
an adapter that is not in use there takes a slot. All of it is in the host's own measured times, so
that executors of different speeds and sizes are compared.

Where costs are alike, requests that go on alike choose the same host, by rendezvous hashing
(Thaler and Ravishankar 1998): so prompts of a family meet where the first of them was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler_service.core.request import Request
from scheduler_service.fleet.host_state import HostState
from scheduler_service.fleet.prefix_index import PrefixIndex
from scheduler_service.fleet.prefix_walks import CachedPrefix
from scheduler_service.fleet.router import Choice

# What is computed keeps others waiting, too: a cached token is worth more than one of waiting.
_NEW_TOKEN_WEIGHT = 1.25
# The next reuse of what is evicted is not certain, and the least recently used goes first.
_EVICTED_RATIO = 0.125
# An adapter that no row uses has to be loaded, as far as anybody knows.
_ADAPTER_TOKENS = 256
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

    def add(self, state: HostState) -> None:
        device, host = state.host.pools
        self._index.add(state.number, state.host.config, device, host)

    def remove(self, state: HostState) -> None:
        self._index.remove(state.number)

    def given(self, state: HostState, request: Request) -> None:
        if request.unfinished:
            self._index.expect(state.number, request)

    def step_begins(self, state: HostState) -> None:
        self._index.settle(state.number)

    def rank(self, request: Request, states: Sequence[HostState]) -> Iterator[Choice]:
        if not states:
            return
        if not request.unfinished:
            yield from map(Choice, states)
            return
        prefixes = self._index.find(request)
        costs_ns = self._costs(request, states, prefixes.cached)
        first = _first(states, costs_ns, prefixes.family)
        yield Choice(states[first], costs_ns[first])
        for index in sorted(range(len(states)), key=costs_ns.__getitem__):
            if index != first:
                yield Choice(states[index], costs_ns[index])

    def _costs(
        self, request: Request, states: Sequence[HostState], cached: dict[int, CachedPrefix]
    ) -> list[float]:
        """Of each of `states`. Asked for every request, so what most have in common comes first."""
        num_tokens = len(request.unfinished[0].token_ids)
        weighed = num_tokens * _NEW_TOKEN_WEIGHT
        costs_ns = []
        hit_of = cached.get
        for state in states:
            token_ns = state.token_ns
            cost_ns = state.ahead_ns + weighed * token_ns
            hit = hit_of(state.number)
            num_blocks = num_tokens // state.block_size
            if hit is not None:
                cost_ns += hit.num_host_blocks * state.block_ns
                cost_ns -= hit.num_tokens * _NEW_TOKEN_WEIGHT * token_ns
                num_blocks += hit.num_host_blocks - hit.num_tokens // state.block_size
            if num_blocks > state.num_blank_blocks:
                cost_ns += _pressure_tokens(state, num_blocks) * token_ns
            costs_ns.append(cost_ns)
        if adapter := request.scheduling.adapter:
            for index, state in enumerate(states):
                if adapter not in state.host.adapters:
                    costs_ns[index] += _ADAPTER_TOKENS * state.token_ns
        return costs_ns


def _pressure_tokens(state: HostState, num_blocks: int) -> float:
    """What others have to compute again where so many blocks are not blank."""
    num_evicted = num_blocks - state.num_blank_blocks
    # What is not even free is taken from those that run.
    num_taken = max(0, num_blocks - state.num_free_blocks)
    return state.block_size * (num_evicted * _EVICTED_RATIO + num_taken)


def _first(states: Sequence[HostState], costs_ns: Sequence[float], family: int) -> int:
    """The best one; of those that are alike, the one that a family of requests has in common."""
    least_ns = min(costs_ns)
    least = costs_ns.index(least_ns)
    limit_ns = max(least_ns * _ALIKE_RATIO, least_ns + _ALIKE_TOKENS * states[least].token_ns)
    alike = [index for index, cost_ns in enumerate(costs_ns) if cost_ns <= limit_ns]
    if len(alike) == 1:
        return least
    return max(alike, key=lambda index: (family ^ states[index].salt) * _MIX % _WORD)
