"""Command `splitserve explain`: why a request waited, was preempted, moved or refused."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from splitserve.scheduler.v1 import admin_pb2
from splitserve_cli.command_line import add_operators_server, ask, operators_config, run
from splitserve_client.scheduler_info import (
    Explanation,
    LifeEvent,
    LifePart,
    Obstacle,
    QueueExplanation,
    RequestLife,
    decode_explanation,
)
from splitserve_rpc.text import printable

_EPILOG = """\
exit code: 0 something is known of it; 1 nothing is, or nobody can be asked. A journal knows nothing
of requests that were refused, nor of what happened before its file begins.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="splitserve explain",
        description="Says what happened to a request, and what it waits for.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST",
        help="its id; or the id of an answer of the gateway, or the x-request-id of one; or six or"
        " more characters that it begins with, if only one does",
    )
    parser.add_argument("--next", action="store_true", help="why the first in the queue wait")
    parser.add_argument("--journal", metavar="FILE", type=Path, help="ask a journal, no scheduler")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_operators_server(parser)
    arguments = parser.parse_args(argv)
    if (arguments.request is None) != arguments.next:
        parser.error("give a REQUEST, or --next")
    if arguments.next and arguments.journal is not None:
        parser.error("--next is for a running scheduler: in a journal nobody waits any more")
    if arguments.journal is not None:
        return _explain_journal(arguments)
    return run("explain", lambda: _explain_live(arguments))


async def _explain_live(arguments: argparse.Namespace) -> int:
    config = operators_config(arguments)
    if arguments.next:
        queue = await ask(arguments, config, lambda operators: operators.explain_queue())
        sys.stdout.write(
            json.dumps(asdict(queue)) + "\n" if arguments.json else describe_queue(queue)
        )
        return 0
    explanation = await ask(
        arguments, config, lambda operators: operators.explain(arguments.request)
    )
    return _show(arguments, explanation)


def _explain_journal(arguments: argparse.Namespace) -> int:
    """Explains a request from a journal.

    A program of the scheduler replays the file; this package does not import the scheduler.
    """
    program = [sys.executable, "-P", "-m", "scheduler_service.watching.explain_journal"]
    command = [*program, str(arguments.journal), arguments.request]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if answer.returncode:
        return answer.returncode
    return _show(arguments, decode_explanation(admin_pb2.ExplainResponse.FromString(answer.stdout)))


def _show(arguments: argparse.Namespace, explanation: Explanation) -> int:
    sys.stdout.write(
        json.dumps(asdict(explanation)) + "\n"
        if arguments.json
        else describe_explanation(
            arguments.request, explanation, is_of_journal=arguments.journal is not None
        )
    )
    return 0 if explanation.lives else 1


# -- history of a request as text ------------------------------------------------------------------

_NUM_FIRST = 16
_NEARLY_ALL_RATIO = 0.95
_REFUSALS = "of which docs/operations.md says what to do (Refusals)"
_WAITING = ("queued", "given")
_OF_JOURNAL = (
    "from a journal: of requests that were there when the file begins, what happened before is not"
    " in it (FILE.1 has what was before FILE)"
)
_NOT_RECORDED = "not_recorded"


def describe_explanation(
    request_id: str, explanation: Explanation, *, is_of_journal: bool = False
) -> str:
    """Returns a text about all matching requests, or about the record if none matches."""
    if not explanation.lives:
        unknown = _unknown_to_journal if is_of_journal else _unknown
        return "\n".join(unknown(request_id, explanation)) + "\n"
    text = "\n".join("\n".join(_life(life)) + "\n" for life in explanation.lives)
    return f"{text}\n{_OF_JOURNAL}\n" if is_of_journal else text


def describe_queue(queue: QueueExplanation) -> str:
    """Returns a text that says why the first requests of the waiting queue wait."""
    if not queue.first:
        return "nobody waits for an executor\n"
    number = queue.num_unassigned_requests
    lines = [f"{number} wait{'s' if number == 1 else ''} for an executor; first in the queue:"]
    for each in queue.first:
        tenant = f" (tenant {printable(each.tenant)})" if each.tenant else ""
        lines.append(f"{printable(each.request_id)}{tenant}")
        lines += _obstacles(each.obstacles)
    return "\n".join(lines) + "\n"


def summary(life: RequestLife) -> str:
    """Returns a summary of a request's history in one or two sentences."""
    clauses = [*_clauses(life)]
    text = "; ".join(clauses) or f"it took {seconds(life.duration_s)}"
    return f"{text[0].upper()}{text[1:]}."


def _clauses(life: RequestLife) -> Iterator[str]:
    if waited := _total(life, *_WAITING):
        longest = next(part for part in life.parts if part.phase in _WAITING)
        why = because(longest.reason, longest.executor)
        is_all = longest.duration_s > _NEARLY_ALL_RATIO * waited
        of_it = "" if is_all else f"{seconds(longest.duration_s)} of it "
        is_begun = any(event.kind == "began" for event in life.events)
        until = " until it began" if is_begun else ""
        yield f"it waited {seconds(waited)}{until}" + (
            f", {of_it}because {why}" if longest.reason else ""
        )
    prompt_s = sum(p.duration_s for p in life.parts if p.phase == "prompt" and not p.reason)
    if prompt_s:
        yield f"its prompt took {seconds(prompt_s)}"
    if tokens_s := _total(life, "tokens"):
        yield f"its tokens took {seconds(tokens_s)}"
    yield from _setbacks(life)
    if life.current is not None:
        yield f"now, since {seconds(life.current.duration_s)}, {doing(life.current)}"
    elif (last := life.events[-1]).kind == "ended":
        yield f"it ended: {_with_detail(last)}"
    elif last.kind == "refused":
        yield f"it was refused: {_with_detail(last)}, {_REFUSALS}"


def _with_detail(event: LifeEvent) -> str:
    detail = f" ({printable(event.detail)})" if event.detail else ""
    return f"{ending(event.reason)}{detail}"


def _setbacks(life: RequestLife) -> Iterator[str]:
    numbers = {
        "it was preempted": ("preempted", "swapped_out"),
        "its executor was lost": ("executor_lost",),
        "a step failed that had it": ("kv_lost",),
        "it was tried alone, as executors may have died of it": ("quarantined",),
        "it was acquitted of that": ("acquitted",),
    }
    for text, kinds in numbers.items():
        if number := sum(event.kind in kinds for event in life.events):
            yield text if number == 1 else f"{text} {number} times"
    away_s = _total(life, "preempted", "swapped", "recovering")
    again_s = sum(p.duration_s for p in life.parts if p.phase == "prompt" and p.reason)
    if away_s:
        yield f"all that kept it from going on for {seconds(away_s)}"
    if again_s:
        yield f"to compute again what was known took {seconds(again_s)}"


def _total(life: RequestLife, *phases: str) -> float:
    return sum(part.duration_s for part in life.parts if part.phase in phases)


def _life(life: RequestLife) -> list[str]:
    tenant = f", tenant {printable(life.tenant)}" if life.tenant else ""
    began = f", {_date(life.began_at_s)}" if life.began_at_s is not None else ""
    lines = [f"request {printable(life.request_id)}{tenant}{began}", summary(life), ""]
    for number, event in enumerate(life.events):
        if number == _NUM_FIRST and life.num_events_left_out:
            lines.append(f"{'':13}... {life.num_events_left_out} events are not kept ...")
        lines.append(f"{event.at_s:+11.3f} s {kind_of(event):20} {details_of(event)}".rstrip())
    if life.obstacles:
        lines += ["", "what keeps it now:", *_obstacles(life.obstacles)]
    if life.parts:
        lines += ["", "its time:", *map(_part, life.parts)]
    if life.num_draft_tokens or life.num_more_tokens:
        lines.append("several tokens a step: " + "; ".join(_more_tokens(life)))
    return lines


def _more_tokens(life: RequestLife) -> Iterator[str]:
    """Yields counts of draft and further tokens, and the output tokens per step that had output."""
    if life.num_draft_tokens:
        right = life.num_accepted_draft_tokens
        yield f"{life.num_draft_tokens} guessed, {right} of them right"
    if num_run_on := life.num_more_tokens - life.num_accepted_draft_tokens:
        yield f"{num_run_on} as the executor ran on"
    first, last = life.events[0].numbers, life.events[-1].numbers
    num_tokens = last.get("num_output_tokens", 0) - first.get("num_resumed_tokens", 0)
    if num_steps := max(0, num_tokens - life.num_more_tokens):
        yield f"{num_tokens / num_steps:.2f} tokens for each step that brought some"


def _part(part: LifePart) -> str:
    why = because(part.reason, part.executor) if part.reason else printable(part.executor)
    return f"{seconds(part.duration_s):>13} {part.phase:20} {why}".rstrip()


def _obstacles(obstacles: Iterable[Obstacle]) -> list[str]:
    return [
        f"  {printable(each.executor)}: {because(each.reason, each.executor)}" for each in obstacles
    ] or [f"  {because('no_executor', '')}"]


def _unknown_to_journal(request_id: str, explanation: Explanation) -> Iterator[str]:
    yield f"nothing is known of {printable(request_id)}"
    yield (
        f"the journal has {explanation.num_living + explanation.num_ended} requests; none of those"
        " that were refused, or that ended before this file begins"
        " (FILE.1 has what was before FILE)"
    )
    yield from _alike(explanation)


def _unknown(request_id: str, explanation: Explanation) -> Iterator[str]:
    yield f"nothing is known of {printable(request_id)}"
    if not explanation.num_kept_at_most:
        yield "this scheduler writes nothing down: start it with --remember-requests above 0"
        return
    num_ended, num_kept = explanation.num_ended, explanation.num_kept_at_most
    yield (
        f"known are {explanation.num_living} unfinished requests and {num_ended} that ended; of"
        f" these the last {num_kept} are remembered (--remember-requests)"
    )
    forgotten = "ended and is no longer remembered, or " if num_ended >= num_kept else ""
    yield (
        f"so, if that is its id, it {forgotten}came before this scheduler was started, or to"
        " another, or was refused by a gateway, whose answer said why"
    )
    yield from _alike(explanation)


def _alike(explanation: Explanation) -> Iterator[str]:
    if explanation.near_request_ids:
        yield "alike are: " + ", ".join(map(printable, explanation.near_request_ids))


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# -- names in a history as text --------------------------------------------------------------------

# Reasons why a request does not proceed; `{}` is the executor.
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
# Reasons why a request was assigned to the executor `{}`.
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
    """Returns why a request did not proceed; an unknown name is returned unchanged."""
    where = printable(executor) or "every executor"
    known = _BECAUSE.get(reason)
    return printable(reason) if known is None else known.format(where)


def kind_of(event: LifeEvent) -> str:
    """Returns the kind of an event as text."""
    return _KINDS.get(event.kind, printable(event.kind))


def details_of(event: LifeEvent) -> str:
    """Returns the executor, the reason and the numbers of an event."""
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
    """Returns how a request ended, or why it was refused."""
    return _ENDS.get(reason, printable(reason))


def _given(event: LifeEvent) -> Iterator[str]:
    """Yields why this executor was chosen, and the numbers that were compared."""
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
    """Returns the current activity of an unfinished request."""
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
    """Formats a duration with few digits."""
    if duration_s < 1:
        return f"{duration_s * 1000:.3g} ms"
    return f"{duration_s:.1f} s" if duration_s < 600 else f"{duration_s / 60:.0f} min"


def _counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
