"""What a request costs at each host: the time of what is computed there before its first token.

That is what waits there already, and what of the request is not cached. What is in the host pool
has to be brought back; who runs there shares every step; blocks that are taken from a full pool are
computed again by somebody; an adapter that is not in use there takes a slot. All of it is in the
host's own measured times, so that executors of different speeds and sizes are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scheduler_service.core.request import Request
from scheduler_service.fleet.host_state import HostState

# What is computed keeps others waiting, too: a cached token is worth more than one of waiting.
_NEW_TOKEN_WEIGHT = 1.25
# The next reuse of what is evicted is not certain, and the least recently used goes first.
_EVICTED_RATIO = 0.125
# An adapter that no row uses has to be loaded, as far as anybody knows.
_ADAPTER_TOKENS = 256


class _Seen(NamedTuple):
    """What a cost needs of a host. `num_blank`, `num_free`: tokens that such blocks hold."""

    ahead_ns: float
    token_ns: float
    num_blank: int
    num_free: int


class HostCosts:
    """What was seen of each host last, by its number."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def seen(self, state: HostState) -> None:
        """Takes over what is known of a host."""
        num_blank = state.num_blank_blocks * state.block_size
        num_free = state.num_free_blocks * state.block_size
        self._seen[state.number] = _Seen(state.ahead_ns, state.token_ns, num_blank, num_free)

    def of(
        self,
        request: Request,
        states: Sequence[HostState],
        num_cached: Mapping[int, int],
        num_in_host_pool: Mapping[int, int],
    ) -> list[float]:
        """Returns what a request costs at each of `states`, which were seen, in ns.

        By number of the host, where there are any: `num_cached` tokens of the request, and
        `num_in_host_pool` blocks of it.
        """
        numbers = [state.number for state in states]
        num_tokens = len(request.unfinished[0].token_ids)
        num_new = [num_tokens] * len(states)
        if num_cached:
            num_new = [num_tokens - num_cached.get(number, 0) for number in numbers]
        num_placed = num_new
        if num_in_host_pool:
            brought = [num_in_host_pool.get(number, 0) for number in numbers]
            columns = zip(num_new, brought, states, strict=True)
            num_placed = [new + blocks * state.block_size for new, blocks, state in columns]
        costs_ns = self._of_new(numbers, num_new, num_placed)
        for index, state in enumerate(states if num_in_host_pool else ()):
            costs_ns[index] += num_in_host_pool.get(state.number, 0) * state.block_ns
        adapter = request.scheduling.adapter
        for index, state in enumerate(states if adapter else ()):
            if adapter not in state.host.adapters:
                costs_ns[index] += _ADAPTER_TOKENS * state.token_ns
        return costs_ns

    def _of_new(
        self, numbers: Sequence[int], num_new: Sequence[int], num_placed: Sequence[int]
    ) -> list[float]:
        """Returns costs for so many tokens that are computed, and so many that need room."""
        hosts = map(self._seen.__getitem__, numbers)
        # What is not blank is evicted; what is not even free is taken from those that run.
        return [
            ahead_ns + token_ns * new * _NEW_TOKEN_WEIGHT
            if placed <= blank
            else ahead_ns
            + token_ns * (new * _NEW_TOKEN_WEIGHT + (placed - blank) * _EVICTED_RATIO)
            + token_ns * (placed - free if placed > free else 0)
            for (ahead_ns, token_ns, blank, free), new, placed in zip(
                hosts, num_new, num_placed, strict=True
            )
        ]
