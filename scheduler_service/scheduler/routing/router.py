"""Which executor gets a request, of those that could begin it now or soon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler_service.scheduler.engine.engine import Engine
from scheduler_service.scheduler.routing.prefix_index import Prefixes, PrefixIndex
from scheduler_service.scheduler.values.request import Request


class Choice(NamedTuple):
    """A host for a request, and what it costs there: least is best, if the router knows that.

    `num_cached`: tokens of it that the router found there.
    """

    state: HostState
    cost_ns: float = 0.0
    num_cached: int = 0


class Router(Protocol):
    """Compares hosts."""

    def add(self, state: HostState) -> None:
        """There is another host."""

    def remove(self, state: HostState) -> None:
        """A host is gone, or takes nobody any more."""

    def given(self, state: HostState, request: Request) -> None:
        """A host is about to get a request."""

    def step_begins(self, state: HostState) -> None:
        """A host is about to plan a step, or is looked at for another reason."""

    def seen(self, state: HostState) -> None:
        """A host was looked at."""

    def find(self, request: Request) -> Prefixes:
        """Returns which hosts have computed a prefix of a waiting request."""

    def rank(
        self, request: Request, states: Sequence[HostState], prefixes: Prefixes
    ) -> Iterator[Choice]:
        """Iterates over hosts for a request, the best one first. `prefixes`: as `find` says."""


class LeastLoaded:
    """The host with the fewest tokens."""

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


# -- State of one engine as the router sees it, read once for many comparisons ---------------------
#
# Reading it costs more than comparing, and an engine changes only when it plans or applies a step
# or loses a request. So it is read anew after such a change, and requests are compared with the
# copy.

# Times are those of so many tokens or blocks, so that little is lost by whole nanoseconds.
_NUM_MEASURED = 1000
# A request that begins shares its steps with every row there for a while: so many tokens of each.
_ROW_TOKENS = 16
# Time of a token while no step of any executor was measured.
ASSUMED_TOKEN_NS = 50_000.0
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(slots=True, eq=False)
class HostState:
    """An engine, its number among those that take requests, and its state at the latest `look`.

    `kind`: the same for engines with equal configurations. `is_open_soon`: a row and blocks are
    free; `is_open`: tokens of the next step are, too. `ahead_ns`: time of what is computed before,
    or together with, the prompt of a request that begins now. `num_blank_blocks`: free blocks
    without contents. `token_ns`: time of a prompt token, `is_measured` if it is known. `block_ns`:
    time of bringing a block from the host pool. `num_pending_tokens`: of prompts, to be computed.
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
        """A number derived from `number`, far from those of other engines."""
        return self.number * _STRIDE

    def look(self, usual_token_ns: float) -> None:
        """Reads the state of the engine; `usual_token_ns`: time of a token at other engines."""
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
        """Counts a request that begins there in a moment: its rows, and tokens to be computed."""
        num_blocks = -(-num_tokens // self.block_size)
        self.ahead_ns += self.token_ns * num_tokens
        self.num_pending_tokens += num_tokens
        self.num_free_rows -= num_rows
        self.num_free_blocks -= num_blocks
        self.num_blank_blocks = max(0, self.num_blank_blocks - num_blocks)
        self.is_open_soon &= self.num_free_rows > 0 and self.num_free_blocks > 0
        has_tokens = self.num_pending_tokens < self.host.config.max_num_batched_tokens
        self.is_open = self.is_open_soon and self.is_open and has_tokens


# --------------------------------------------------------------------------------------------------
# What a request costs at each host: the time of what is computed there before its first token.
#
# That is what waits there already, and what of the request is not cached. What is in the host pool
# has to be brought back; who runs there shares every step; blocks that are taken from a full pool
# are computed again by somebody; an adapter that is not in use there takes a slot. All of it is in
# the host's own measured times, so that executors of different speeds and sizes are compared.

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


# --------------------------------------------------------------------------------------------------
# The executor at which a request has its first token soonest: longest cached prefix against load.
#
# Where costs are alike, requests that go on alike choose the same host, by rendezvous hashing
# (Thaler and Ravishankar 1998): so prompts of a family meet where the first of them was.

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
