"""Frames of a scheduler put together: what is the case now."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_rpc.printable import printable

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


# -- What numbers of the contract are called, and why somebody waits, as a sentence ----------------

# Executors of one reason; of more their number is said.
_MAX_NAMED = 2
# As `LivePool.states` counts them.
BLOCK_STATES = ("free", "held", "shared", "cached", "given back", "on the move")
# As `LiveStep.kinds` does; there is no 0.
ROW_KINDS = ("", "prompt", "decode", "drafts", "run")

_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "turn": "its turn comes with one of the next steps",
        "executor": "no executor is connected",
        "fitting_executor": "it can never run there",
        "blocks": "there are too few free blocks",
        "rows": "there is no free row",
        "bytes": "parameters of sampling take all of their memory",
        "share": "its tenant has its share while others wait",
        "adapter_slot": "there is no slot for its adapter",
        "budget": "rows and prompts before it take the tokens of the next step",
        "results": "steps in flight concern it",
        "open_executor": "the executor takes nobody for now",
        "others_first": "others that wait there go first",
    }
)


def state_word(state: int) -> str:
    """Of an executor; one that we do not know is a number."""
    return _word(live.LiveState, "LIVE_STATE_", state)


def lack_word(lack: int) -> str:
    """What a request lacks; one that we do not know is a number."""
    return _word(live.LiveLack, "LIVE_LACK_", lack)


def why(reason: live.LiveReason) -> str:
    """Why a request waits, wherever that is."""
    word = lack_word(reason.lack)
    sentence = _SENTENCES.get(word, f"it lacks {word}")
    if reason.num_needed:
        are = "is" if reason.num_free == 1 else "are"
        sentence = f"it needs {reason.num_needed} blocks, and {reason.num_free} {are} free"
    return sentence


def reasons_of_all(reasons: Iterable[live.LiveReason]) -> list[str]:
    """A sentence for each reason that there is, with all executors that have it."""
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
