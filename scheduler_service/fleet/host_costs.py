"""What a request costs at each host: the time of what is computed there before its first token.

That is what waits there already, and what of the request is not cached. What is in the host pool
has to be brought back; who runs there shares every step; blocks that are taken from a full pool are
computed again by somebody; an adapter that is not in use there takes a slot. All of it is in the
host's own measured times, so that executors of different speeds and sizes are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler_service.core.request import Request
from scheduler_service.fleet.host_state import HostState
from scheduler_service.fleet.prefix_index import Prefixes

# What is computed keeps others waiting, too: a cached token is worth more than one of waiting.
_NEW_TOKEN_WEIGHT = 1.25
# The next reuse of what is evicted is not certain, and the least recently used goes first.
_EVICTED_RATIO = 0.125
# An adapter that no row uses has to be loaded, as far as anybody knows.
_ADAPTER_TOKENS = 256


class HostCosts:
    """What was seen of each host last, in columns by its number.

    One request is compared with all hosts in one pass over lists: for a fleet of 64 that takes half
    the time of arrays, or of a look at each state. `_blank`, `_free`: tokens that such blocks hold.
    """

    def __init__(self) -> None:
        self._ahead_ns: list[float] = []
        self._token_ns: list[float] = []
        self._blank: list[int] = []
        self._free: list[int] = []

    def seen(self, state: HostState) -> None:
        """Takes over what is known of a host."""
        number = state.number
        while number >= len(self._ahead_ns):
            self._ahead_ns.append(0.0)
            self._token_ns.append(0.0)
            self._blank.append(0)
            self._free.append(0)
        self._ahead_ns[number] = state.ahead_ns
        self._token_ns[number] = state.token_ns
        self._blank[number] = state.num_blank_blocks * state.block_size
        self._free[number] = state.num_free_blocks * state.block_size

    def of(self, request: Request, states: Sequence[HostState], prefixes: Prefixes) -> list[float]:
        """What a request costs at each of `states`, which were seen, in ns."""
        num_new = [len(request.unfinished[0].token_ids)] * len(self._ahead_ns)
        for number, num_cached in zip(prefixes.numbers, prefixes.num_tokens, strict=True):
            num_new[number] -= num_cached
        num_brought = dict[int, int]()
        if any(prefixes.num_host_blocks):
            num_brought = dict(zip(prefixes.numbers, prefixes.num_host_blocks, strict=True))
        all_ns = self._of_new(num_new, _with_brought(num_new, states, num_brought))
        costs_ns = [all_ns[state.number] for state in states]
        for index, state in enumerate(states if num_brought else ()):
            costs_ns[index] += num_brought.get(state.number, 0) * state.block_ns
        adapter = request.scheduling.adapter
        for index, state in enumerate(states if adapter else ()):
            if adapter not in state.host.adapters:
                costs_ns[index] += _ADAPTER_TOKENS * state.token_ns
        return costs_ns

    def _of_new(self, num_new: Sequence[int], num_placed: Sequence[int]) -> list[float]:
        """By number, for so many tokens that are computed, and so many that need room."""
        times_ns, places = (self._ahead_ns, self._token_ns), (self._blank, self._free)
        columns = zip(num_new, num_placed, *times_ns, *places, strict=True)
        # What is not blank is evicted; what is not even free is taken from those that run.
        return [
            ahead_ns + token_ns * new * _NEW_TOKEN_WEIGHT
            if placed <= blank
            else ahead_ns
            + token_ns * (new * _NEW_TOKEN_WEIGHT + (placed - blank) * _EVICTED_RATIO)
            + token_ns * (placed - free if placed > free else 0)
            for new, placed, ahead_ns, token_ns, blank, free in columns
        ]


def _with_brought(
    num_new: list[int], states: Sequence[HostState], num_brought: Mapping[int, int]
) -> list[int]:
    if not num_brought:
        return num_new
    num_placed = num_new.copy()
    for state in states:
        num_placed[state.number] += num_brought.get(state.number, 0) * state.block_size
    return num_placed
