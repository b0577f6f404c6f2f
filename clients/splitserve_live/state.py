"""Current state of a scheduler, combined from its frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_common import printable

# Limit of stored steps per executor.
_MAX_STEPS = 120
# Number of blocks that a map shows even if all are free.
_LEAST_SHOWN = 64
# One for each value of a byte: a newer scheduler may send states that have no word here.
_NUM_STATES = 256
# Points of the scheduler's history: five minutes.
_MAX_POINTS = 150


@dataclass(slots=True)
class Pool:
    """Blocks of one pool: the state of each, as in `LivePool.states`, and its holder.

    `counts`: number of blocks in each state. `num_touched`: all blocks from this one on are free
    and empty.
    """

    block_size: int = 0
    states: bytearray = field(default_factory=bytearray)
    holders: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * _NUM_STATES)
    num_touched: int = 0

    @property
    def num_shown(self) -> int:
        """Number of blocks that a map shows: all up to the last that is not free and empty.

        Rounded up to a power of two, so that the map rarely grows; all further blocks are free.
        """
        wanted = max(self.num_touched, _LEAST_SHOWN)
        return min(len(self.states), 1 << (wanted - 1).bit_length())

    def take(self, changes: live.LivePool) -> None:
        """Applies the changes of a frame."""
        self.block_size = changes.block_size
        missing = changes.num_blocks - len(self.states)
        if missing > 0:
            self.states.extend(bytes(missing))
            self.holders.extend([0] * missing)
            self.counts[0] += missing
        for block, state, holder in zip(
            changes.changed, changes.states, changes.holders, strict=True
        ):
            self.counts[self.states[block]] -= 1
            self.counts[state] += 1
            self.states[block] = state
            self.holders[block] = holder
            self.num_touched = max(self.num_touched, block + 1)
        while self.num_touched and not self.states[self.num_touched - 1]:
            self.num_touched -= 1


@dataclass(slots=True)
class LiveExecutor:
    """State of one life of an executor.

    `latest`: its latest message. `steps`: the latest steps that it answered.
    """

    latest: live.LiveExecutor
    device: Pool = field(default_factory=Pool)
    host: Pool = field(default_factory=Pool)
    steps: deque[live.LiveStep] = field(default_factory=lambda: deque(maxlen=_MAX_STEPS))


class LiveState:
    """State of a scheduler. `frame`: the latest; `executors`: its executors, by address.

    `history`: completed points, oldest first.
    """

    def __init__(self) -> None:
        self.frame = live.WatchSchedulerResponse()
        self.executors: dict[str, LiveExecutor] = {}
        self.history = deque[live.LivePoint](maxlen=_MAX_POINTS)
        self._names: dict[int, live.LiveRequest] = {}

    def take(self, frame: live.WatchSchedulerResponse) -> None:
        """Applies the next frame of a stream."""
        self.frame = frame
        self.history.extend(frame.history)
        if frame.forgets_requests:
            self._names.clear()
        self._names.update((request.number, request) for request in frame.new_requests)
        executors = {}
        for latest in frame.executors:
            known = self.executors.get(latest.address)
            if known is None or known.latest.life != latest.life:
                known = LiveExecutor(latest)
            known.latest = latest
            known.device.take(latest.device)
            known.host.take(latest.host)
            known.steps.extend(latest.steps)
            executors[latest.address] = known
        self.executors = executors

    def request(self, number: int) -> live.LiveRequest:
        """Returns the request with the number; one without an id if the number is unknown."""
        return self._names.get(number) or live.LiveRequest(number=number)

    def requests(self, numbers: Sequence[int]) -> list[live.LiveRequest]:
        """Returns the requests with the numbers, like `request`."""
        return [self.request(number) for number in numbers]


# -- words for enum values, and sentences for reasons ----------------------------------------------

# A reason names up to this many executors, otherwise their number.
_MAX_NAMED = 2
# Indexed by the values of `LivePool.states`.
BLOCK_STATES = ("free", "held", "shared", "cached", "given back", "on the move")
# Indexed by the values of `LiveStep.kinds`, of which there is no 0.
ROW_KINDS = ("", "prompt", "decode", "drafts", "run")

_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "turn": "it is scheduled in one of the next steps",
        "executor": "no executor is connected",
        "fitting_executor": "it can never run there",
        "blocks": "there are too few free blocks",
        "rows": "there is no free row",
        "bytes": "sampling parameters fill their memory",
        "share": "its tenant has used its share while others wait",
        "adapter_slot": "there is no free slot for its adapter",
        "adapter_load": "its adapter is being loaded",
        "budget": "rows and prompts ahead of it use the token budget of the next step",
        "results": "steps in flight still include it",
        "open_executor": "the executor accepts no requests for now",
        "others_first": "other requests waiting there go first",
    }
)


def state_word(state: int) -> str:
    """Returns the word for an executor's state; an unknown state is a number."""
    return _word(live.LiveState, "LIVE_STATE_", state)


def lack_word(lack: int) -> str:
    """Returns the word for what a request lacks; an unknown value is a number."""
    return _word(live.LiveLack, "LIVE_LACK_", lack)


def why(reason: live.LiveReason) -> str:
    """Returns a sentence that says why a request waits."""
    word = lack_word(reason.lack)
    sentence = _SENTENCES.get(word, f"it waits for {word}")
    if reason.num_needed:
        are = "is" if reason.num_free == 1 else "are"
        sentence = f"it needs {reason.num_needed} blocks, and {reason.num_free} {are} free"
    return sentence


def reasons_of_all(reasons: Iterable[live.LiveReason]) -> list[str]:
    """Returns a sentence for each distinct reason, with the executors that have it."""
    addresses: dict[str, list[str]] = {}
    for reason in reasons:
        where = addresses.setdefault(why(reason), [])
        if reason.address:
            where.append(printable(reason.address))
    return [_placed(sentence, where) for sentence, where in addresses.items()]


def _placed(sentence: str, where: Sequence[str]) -> str:
    if not where:
        return sentence
    named = ", ".join(where) if len(where) <= _MAX_NAMED else f"{len(where)} executors"
    return f"{sentence} ({named})"


def _word(enum: type[live.LiveState] | type[live.LiveLack], prefix: str, number: int) -> str:
    if number not in enum.values():
        return str(number)
    return enum.Name(number).removeprefix(prefix).lower()
