"""Routers, which compare executors for a request by their state, load and cached prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.routing.prefix_index import Prefixes, PrefixIndex
from scheduler_service.scheduler.values import Request


class Choice(NamedTuple):
    """Candidate host for a request, with its cost there; the router prefers small costs.

    `cost_ns`: 0 for a router without costs. `num_cached`: tokens of the request that the router
    found cached there.
    """

    state: HostState
    cost_ns: float = 0.0
    num_cached: int = 0


class Router(Protocol):
    """Comparison of hosts (engines of executors) for requests."""

    def add(self, state: HostState) -> None:
        """Adds a host."""

    def remove(self, state: HostState) -> None:
        """Removes a host that left or accepts no further requests."""

    def given(self, state: HostState, request: Request) -> None:
        """Notes that a host is about to receive a request."""

    def step_begins(self, state: HostState) -> None:
        """Notes that a host is about to plan a step, or that the caller reads its state."""

    def seen(self, state: HostState) -> None:
        """Notes that the state of a host was read or updated."""

    def find(self, request: Request) -> Prefixes:
        """Returns the cached prefixes of a waiting request at all hosts."""

    def rank(
        self, request: Request, states: Sequence[HostState], prefixes: Prefixes
    ) -> Iterator[Choice]:
        """Iterates over hosts for a request, best first. `prefixes`: result of `find`."""


class LeastLoaded:
    """Router that prefers the host with the fewest unfinished tokens."""

    def add(self, state: HostState) -> None:
        pass

    def remove(self, state: HostState) -> None:
        pass

    def given(self, state: HostState, request: Request) -> None:
        pass

    def step_begins(self, state: HostState) -> None:
        pass

    def seen(self, state: HostState) -> None:
        pass

    def find(self, request: Request) -> Prefixes:
        return Prefixes()

    def rank(
        self, request: Request, states: Sequence[HostState], prefixes: Prefixes
    ) -> Iterator[Choice]:
        return map(Choice, sorted(states, key=_load))


def _load(state: HostState) -> int:
    return state.host.num_unfinished_tokens


# -- Router's copy of an engine's state ------------------------------------------------------------
#
# Reading the state costs more than comparing, and an engine changes only when it plans or applies a
# step or loses a request. So the state is read again after such a change, and requests are compared
# by the copy.

# Number of tokens or blocks whose time is asked for, so that rounding to whole ns matters little.
_NUM_MEASURED = 1000
# Tokens counted for each running row, since a beginning request shares its steps with every row.
_ROW_TOKENS = 16
# Assumed time of a token while no step of any executor was measured, in ns.
ASSUMED_TOKEN_NS = 50_000.0
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(slots=True, eq=False)
class HostState:
    """Engine with its number among those that take requests, and its state at the latest `look`.

    `kind`: equal for engines with equal configurations. `is_open_soon`: a row and blocks are free;
    `is_open`: tokens of the next step are free, too. `ahead_ns`: time of the work that is computed
    before, or together with, the prompt of a request that begins now. `num_pending_tokens`: prompt
    tokens still to be computed. `num_blank_blocks`: free blocks without contents. `token_ns`: time
    of a prompt token; `is_measured`: whether it was measured at this engine. `block_ns`: time of
    bringing a block from the host pool.
    """

    host: Engine
    number: int
    kind: int
    is_open: bool = False
    is_open_soon: bool = False
    ahead_ns: float = 0.0
    num_pending_tokens: int = 0
    num_free_rows: int = 0
    num_free_blocks: int = 0
    num_blank_blocks: int = 0
    token_ns: float = ASSUMED_TOKEN_NS
    is_measured: bool = False
    block_ns: float = 0.0
    block_size: int = 1

    @property
    def salt(self) -> int:
        """Number derived from `number`, far from the salts of other engines."""
        return self.number * _STRIDE

    def look(self, usual_token_ns: float) -> None:
        """Reads the state of the engine. `usual_token_ns`: time of a token at other engines."""
        host = self.host
        device, _ = host.pools
        self.num_pending_tokens = num_pending = host.num_pending_tokens
        self.num_free_rows = host.num_free_rows
        self.is_open_soon = host.has_room
        self.is_open = self.is_open_soon and num_pending < host.config.max_num_batched_tokens
        self.num_free_blocks = device.num_free
        self.num_blank_blocks = device.num_blank
        token_ns = host.recompute_ns(_NUM_MEASURED) / _NUM_MEASURED
        self.is_measured = token_ns > 0
        self.token_ns = token_ns or usual_token_ns
        self.block_ns = host.move_ns(_NUM_MEASURED) / _NUM_MEASURED
        self.block_size = host.config.block_size
        self.ahead_ns = self.token_ns * (num_pending + _ROW_TOKENS * host.num_running)

    def expect(self, num_rows: int, num_tokens: int) -> None:
        """Counts a request that is about to begin: its rows, and its tokens to be computed."""
        num_blocks = -(-num_tokens // self.block_size)
        self.ahead_ns += self.token_ns * num_tokens
        self.num_pending_tokens += num_tokens
        self.num_free_rows -= num_rows
        self.num_free_blocks -= num_blocks
        self.num_blank_blocks = max(0, self.num_blank_blocks - num_blocks)
        self.is_open_soon &= self.num_free_rows > 0 and self.num_free_blocks > 0
        has_tokens = self.num_pending_tokens < self.host.config.max_num_batched_tokens
        self.is_open = self.is_open_soon and self.is_open and has_tokens


# -- Costs of a request at each host ---------------------------------------------------------------
#
# A cost is the time of the work at the host before the request's first token. That work is what
# waits there already, and the tokens of the request that are not cached. Blocks in the host pool
# have to be brought back. Running rows share every step. Blocks evicted from a full pool will be
# recomputed by some request. An adapter that is not in use there takes a slot. All times are the
# host's own measurements, so that executors of different speeds and sizes are comparable.

# A computed token delays other requests, too: so a cached token is worth more than a token of
# waiting.
_NEW_TOKEN_WEIGHT = 1.25
# Reuse of an evicted block is not certain, and the least recently used block goes first.
_EVICTED_RATIO = 0.125
# Cost of an adapter that has to be loaded, in tokens, while no load was measured.
_ADAPTER_TOKENS = 256


class _Seen(NamedTuple):
    """State of a host as costs need it. `num_blank`, `num_free`: tokens that such blocks hold."""

    ahead_ns: float
    token_ns: float
    num_blank: int
    num_free: int


class HostCosts:
    """Costs of requests at hosts, from the state of each host seen last, by host number."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def seen(self, state: HostState) -> None:
        """Copies the state of a host."""
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
        """Returns the cost of a request at each of `states`, in ns; all were `seen`.

        `num_cached`: tokens of the request cached at a host; `num_in_host_pool`: blocks of it in
        the host pool. Both are keyed by host number and may lack hosts with 0.
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
            if not state.host.has_adapter(adapter):
                load_ns = state.host.adapter_slots.load_ns
                costs_ns[index] += load_ns or _ADAPTER_TOKENS * state.token_ns
        return costs_ns

    def _of_new(
        self, numbers: Sequence[int], num_new: Sequence[int], num_placed: Sequence[int]
    ) -> list[float]:
        """Returns costs in ns for numbers of computed tokens and of tokens that need blocks."""
        hosts = map(self._seen.__getitem__, numbers)
        # Beyond blank blocks, cached blocks are evicted; beyond free blocks, running requests lose
        # theirs.
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


# -- Prefix router ---------------------------------------------------------------------------------
#
# The best host is that with the earliest first token: longest cached prefix against load. Where
# costs are alike, requests of one family choose the same host by rendezvous hashing (Thaler and
# Ravishankar 1998). So prompts that continue alike meet where the first of them was.

# Largest difference of costs that are alike: in tokens, and as a ratio.
_ALIKE_TOKENS = 8
_ALIKE_RATIO = 1.02
_WORD = 2**64
# Odd multiplier without a pattern: numbers that differ in one bit are far apart afterwards.
_MIX = 0xBF58476D1CE4E5B9


class PrefixRouter:
    """Router that ranks hosts by the estimated time until the first token."""

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
    """Returns whether two choices cost about the same, so that only the family decides."""
    least, most = sorted((choice, other), key=lambda each: each.cost_ns)
    return most.cost_ns <= _limit_ns(least.cost_ns, least.state)


def _choice(state: HostState, cost_ns: float, cached: Mapping[int, int]) -> Choice:
    return Choice(state, cost_ns, cached.get(state.number, 0))


def _first(states: Sequence[HostState], costs_ns: Sequence[float], family: int) -> int:
    """Returns the index of the best host; of alike hosts, the one that the family agrees on."""
    least_ns = min(costs_ns)
    least = costs_ns.index(least_ns)
    limit_ns = _limit_ns(least_ns, states[least])
    alike = [index for index, cost_ns in enumerate(costs_ns) if cost_ns <= limit_ns]
    if len(alike) == 1:
        return least
    return max(alike, key=lambda index: (family ^ states[index].salt) * _MIX % _WORD)


def _limit_ns(least_ns: float, state: HostState) -> float:
    """Returns the largest cost in ns that is alike to `least_ns` at `state`."""
    return max(least_ns * _ALIKE_RATIO, least_ns + _ALIKE_TOKENS * state.token_ns)
