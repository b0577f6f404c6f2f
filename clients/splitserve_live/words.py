"""What numbers of the contract are called, and why somebody waits, as a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_rpc.printable import printable

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
