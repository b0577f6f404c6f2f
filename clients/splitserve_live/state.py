"""Frames of a scheduler put together: what is the case now."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitserve.scheduler.v1 import live_pb2 as live

# Of an executor, the latest.
_MAX_STEPS = 120
# Blocks that a map shows even if all are free.
_LEAST_SHOWN = 64
# Of a byte: a newer scheduler may tell states that have no word here.
_NUM_STATES = 256
# Of the scheduler: five minutes.
_MAX_POINTS = 150


@dataclass(slots=True)
class Pool:
    """The blocks of one pool: what each is, as `LivePool.states` says it, and whose.

    `counts`: how many are in each state. `num_touched`: up to which some are not free and blank.
    """

    block_size: int = 0
    states: bytearray = field(default_factory=bytearray)
    holders: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * _NUM_STATES)
    num_touched: int = 0

    @property
    def num_shown(self) -> int:
        """Returns how many blocks a map shows: all up to the last that is not free and blank.

        Rounded up to a power of two, so that a map seldom becomes larger; the rest is free.
        """
        wanted = max(self.num_touched, _LEAST_SHOWN)
        return min(len(self.states), 1 << (wanted - 1).bit_length())

    def take(self, told: live.LivePool) -> None:
        """What has changed."""
        self.block_size = told.block_size
        missing = told.num_blocks - len(self.states)
        if missing > 0:
            self.states.extend(bytes(missing))
            self.holders.extend([0] * missing)
            self.counts[0] += missing
        for block, state, holder in zip(told.changed, told.states, told.holders, strict=True):
            self.counts[self.states[block]] -= 1
            self.counts[state] += 1
            self.states[block] = state
            self.holders[block] = holder
            self.num_touched = max(self.num_touched, block + 1)
        while self.num_touched and not self.states[self.num_touched - 1]:
            self.num_touched -= 1


@dataclass(slots=True)
class LiveExecutor:
    """One life of an executor. `told`: the latest of it. `steps`: the latest that it answered."""

    told: live.LiveExecutor
    device: Pool = field(default_factory=Pool)
    host: Pool = field(default_factory=Pool)
    steps: deque[live.LiveStep] = field(default_factory=lambda: deque(maxlen=_MAX_STEPS))


class LiveState:
    """What a scheduler shows. `frame`: the latest; `executors`: those that it names, by address.

    `history`: points that are over, oldest first.
    """

    def __init__(self) -> None:
        self.frame = live.WatchSchedulerResponse()
        self.executors: dict[str, LiveExecutor] = {}
        self.history = deque[live.LivePoint](maxlen=_MAX_POINTS)
        self._names: dict[int, live.LiveRequest] = {}

    def take(self, frame: live.WatchSchedulerResponse) -> None:
        """The next one of a stream."""
        self.frame = frame
        self.history.extend(frame.history)
        if frame.forgets_requests:
            self._names.clear()
        self._names.update((request.number, request) for request in frame.new_requests)
        executors = {}
        for told in frame.executors:
            known = self.executors.get(told.address)
            if known is None or known.told.life != told.life:
                known = LiveExecutor(told)
            known.told = told
            known.device.take(told.device)
            known.host.take(told.host)
            known.steps.extend(told.steps)
            executors[told.address] = known
        self.executors = executors

    def request(self, number: int) -> live.LiveRequest:
        """Who has the number; one without a name, if nobody is known by it."""
        return self._names.get(number) or live.LiveRequest(number=number)

    def requests(self, numbers: Sequence[int]) -> list[live.LiveRequest]:
        """The same of several."""
        return [self.request(number) for number in numbers]
