"""What the names in a life of a request mean, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from splitserve_client.explanations import LifeEvent, LifePart
from splitserve_rpc.printable import printable

# Of why a request does not go on; `{}` is the executor.
_BECAUSE: Mapping[str, str] = MappingProxyType(
    {
        "": "nothing kept it",
        "behind_others": "others were before it in the queue",
        "no_executor": "no executor took requests",
        "about_to_begin": "it was about to begin",
        "awaits_better": "a busy executor has less to compute for it than {}",
        "budget": "the steps of {} were full of tokens of other prompts",
        "others_wait_there": "others that waited at {} went first",
        "blocks_on_their_way": "blocks at {} were being freed by steps under way",
        "blocks": "{} had too few free KV blocks",
        "rows": "{} had no free row",
        "bytes": "the sampling parameters of all rows of {} would have been too large with its own",
        "share": "its tenant had its share of {}",
        "adapter_slot": "{} had no slot for its adapter",
        "pool": "the whole KV cache of {} is too small for it",
        "results": "steps under way at {} still concerned it",
        "does_not_fit": "no executor that was there could ever run it",
        "urgency": "a more urgent request needed its place at {}",
        "not_recorded": "of what the journal does not say",
        "begins_sooner_elsewhere": "another executor than {} could begin it sooner",
        "drained": "{} was sent away",
        "failed_there": "it failed at {}, and is tried at another executor",
        "last_executor": "executors may have died of it, and {} is the last one while others are on"
        " their way back",
        "withdrawn": "{} was withdrawn, as what it computed was wrong",
        "executor_lost": "{} was lost",
        "step_failed": "a step of {} failed",
        "quarantined": "executors may have died of it, and it is tried alone",
        "came_through": "it got as far alone as it had to",
        "another_failed": "executors died of another request",
        "again": "tokens that were known had to be computed again at {}",
    }
)
# Of why it was given to `{}` and to no other.
_GIVEN_AS: Mapping[str, str] = MappingProxyType(
    {
        "only_one": "no other than {} could begin it soon",
        "most_cached": "{} has more of it in its caches than others",
        "soonest": "{} has less to do before it than others",
        "as_good_as_others": "{} was as good for it as others",
        "better_is_busy": "{} could begin it; to wait for a better one, which was busy, was not"
        " worth it",
        "waited_long_enough": "{} could begin it; it had waited long enough for a better one, which"
        " was busy",
        "others_yield": "less urgent requests at {} make room for it",
        "no_room_anywhere": "no executor had room for it; it is the first that waits at {}",
        "tried_alone": "{} runs whoever is tried alone",
        "retried": "it failed at another executor than {}",
    }
)
_ENDS: Mapping[str, str] = MappingProxyType(
    {
        "stop": "stop (a token or text that ends it)",
        "length": "length (it has as many tokens as it asked for)",
        "model_length": "model_length (it has as many tokens as the model, or its cache, can hold)",
        "aborted": "aborted (its client took it back)",
        "abandoned": "abandoned (its client was gone)",
        "EXECUTOR_LOST_REPEATEDLY": "EXECUTOR_LOST_REPEATEDLY (executors were lost, or steps"
        " failed, while they computed it, again and again, and also when it was alone)",
    }
)
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "refused": "refused",
        "received": "received",
        "waits": "waits",
        "given": "given to an executor",
        "began": "began",
        "first_token": "first token",
        "preempted": "preempted",
        "swapped_out": "swapped out",
        "swapped_in": "swapped in",
        "kv_lost": "KV lost",
        "taken_back": "taken back",
        "executor_lost": "executor lost",
        "quarantined": "quarantined",
        "acquitted": "acquitted",
        "resumed": "goes on",
        "ended": "ended",
    }
)
_NUMBERS: Mapping[str, Callable[[int], str]] = MappingProxyType(
    {
        "num_waiting": lambda n: f"{n} waited before it",
        "num_chunks": lambda n: f"in {_counted(n, 'step')}",
        "num_prompt_tokens": lambda n: _counted(n, "prompt token"),
        "num_resumed_tokens": lambda n: f"{_counted(n, 'token')} known before",
        "num_tokens": lambda n: f"{_counted(n, 'token')} known",
        "num_cached": lambda n: f"{n} of them in the prefix cache",
        "num_on_host": lambda n: f"{n} of these in the host pool",
        "num_output_tokens": lambda n: _counted(n, "output token"),
        "num_more_tokens": lambda n: f"{n} of them beside one for each step",
        "num_drafts": lambda n: f"{_counted(n, 'guess', 'guesses')} tried",
        "num_accepted": lambda n: f"{n} of them right",
        "num_trials": lambda n: f"until it gets {_counted(n, 'token')} alone",
    }
)


def because(reason: str, executor: str) -> str:
    """Why it did not go on; a name that is not known here stands for itself."""
    where = printable(executor) or "every executor"
    known = _BECAUSE.get(reason)
    return printable(reason) if known is None else known.format(where)


def kind_of(event: LifeEvent) -> str:
    """What happened."""
    return _KINDS.get(event.kind, printable(event.kind))


def details_of(event: LifeEvent) -> str:
    """Where, why, and numbers."""
    if event.kind == "given":
        return "; ".join(_given(event))
    parts = []
    if event.kind == "ended":
        parts.append(ending(event.reason))
    elif event.kind in ("waits", "preempted", "swapped_out", "taken_back", "acquitted"):
        parts.append(because(event.reason, event.executor))
    elif event.reason:
        parts.append(printable(event.reason))
    if event.detail:
        parts.append(printable(event.detail))
    if event.executor and event.kind not in ("waits", "taken_back"):
        parts.append(printable(event.executor))
    known = [name for name in _NUMBERS if name in event.numbers]
    parts += [_NUMBERS[name](event.numbers[name]) for name in known if event.numbers[name]]
    others = sorted(event.numbers.keys() - _NUMBERS.keys())
    parts += [f"{printable(name)} {event.numbers[name]}" for name in others]
    return "; ".join(parts)


def ending(reason: str) -> str:
    """How it ended, or why it was refused."""
    return _ENDS.get(reason, printable(reason))


def _given(event: LifeEvent) -> Iterator[str]:
    """Why this executor, and the numbers that were compared."""
    where, numbers = printable(event.executor), event.numbers
    known = _GIVEN_AS.get(event.reason)
    if known is None and event.reason:
        yield printable(event.reason)
    yield where if known is None else known.format(where)
    if num_cached := numbers.get("num_cached"):
        yield f"{_counted(num_cached, 'token')} of it cached there"
    if num_ahead := numbers.get("num_ahead"):
        yield f"{_counted(num_ahead, 'prompt token')} before it there"
    if num_running := numbers.get("num_running"):
        yield f"{_counted(num_running, 'sequence')} ran there"
    if "cost_elsewhere_us" in numbers:
        own, other = (seconds(numbers.get(f"cost{at}_us", 0) / 1e6) for at in ("", "_elsewhere"))
        elsewhere = numbers.get("num_cached_elsewhere", 0)
        yield f"estimated until its first token: {own}, elsewhere {other} with {elsewhere} cached"


def doing(part: LifePart) -> str:
    """What an unfinished request is doing."""
    match part.phase:
        case "prompt":
            return f"{printable(part.executor)} computes its prompt"
        case "tokens":
            return f"{printable(part.executor)} generates its tokens"
        case "swapped":
            return f"it is in the host pool, as {because(part.reason, part.executor)}"
        case _:
            return f"it waits, as {because(part.reason, part.executor)}"


def seconds(duration_s: float) -> str:
    """In few digits."""
    if duration_s < 1:
        return f"{duration_s * 1000:.3g} ms"
    return f"{duration_s:.1f} s" if duration_s < 600 else f"{duration_s / 60:.0f} min"


def _counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
