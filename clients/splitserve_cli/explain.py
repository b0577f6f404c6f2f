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
from splitserve_client import (
    Explanation,
    LifeEvent,
    LifePart,
    Obstacle,
    QueueExplanation,
    RequestLife,
    decode_explanation,
)
from splitserve_common import printable

_EPILOG = """\
exit code: 0 the request is known; 1 it is unknown, or no scheduler can be queried. A journal has no
refused requests, and nothing from before the beginning of its file.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="splitserve explain",
        description="Shows what happened to a request, and what it waits for.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST",
        help="id of the request, or id or x-request-id of a response of the gateway, or a unique"
        " prefix of at least six characters",
    )
    parser.add_argument(
        "--next", action="store_true", help="show why the first requests in the queue wait"
    )
    parser.add_argument(
        "--journal", metavar="FILE", type=Path, help="read a journal, without a scheduler"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_operators_server(parser)
    arguments = parser.parse_args(argv)
    if (arguments.request is None) != arguments.next:
        parser.error("give a REQUEST, or --next")
    if arguments.next and arguments.journal is not None:
        parser.error("--next needs a running scheduler; it is not allowed with --journal")
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
_REFUSALS = "see docs/operations.md (Refusals)"
_WAITING = ("queued", "assigned")
_OF_JOURNAL = (
    "from a journal: it lacks what happened to a request before the file begins (FILE.1 holds the"
    " part before FILE)"
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
        return "no request waits for an executor\n"
    number = queue.num_unassigned_requests
    lines = [f"{_counted(number, 'request')} waiting for an executor; first in the queue:"]
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
        yield f"prefill took {seconds(prompt_s)}"
    if tokens_s := _total(life, "tokens"):
        yield f"decoding took {seconds(tokens_s)}"
    yield from _setbacks(life)
    if life.current is not None:
        yield f"for the last {seconds(life.current.duration_s)}, {doing(life.current)}"
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
        "a step with it failed": ("kv_lost",),
        "it ran alone, as it may have crashed executors": ("quarantined",),
        "it was acquitted": ("acquitted",),
    }
    for text, kinds in numbers.items():
        if number := sum(event.kind in kinds for event in life.events):
            yield text if number == 1 else f"{text} {number} times"
    away_s = _total(life, "preempted", "swapped", "recovering")
    again_s = sum(p.duration_s for p in life.parts if p.phase == "prompt" and p.reason)
    if away_s:
        yield f"in total this interrupted it for {seconds(away_s)}"
    if again_s:
        yield f"recomputation took {seconds(again_s)}"


def _total(life: RequestLife, *phases: str) -> float:
    return sum(part.duration_s for part in life.parts if part.phase in phases)


def _life(life: RequestLife) -> list[str]:
    tenant = f", tenant {printable(life.tenant)}" if life.tenant else ""
    began = f", {_date(life.began_at_s)}" if life.began_at_s is not None else ""
    lines = [f"request {printable(life.request_id)}{tenant}{began}", summary(life), ""]
    for number, event in enumerate(life.events):
        if number == _NUM_FIRST and life.num_events_left_out:
            lines.append(f"{'':13}... {life.num_events_left_out} events omitted ...")
        lines.append(f"{event.at_s:+11.3f} s {kind_of(event):20} {details_of(event)}".rstrip())
    if life.obstacles:
        lines += ["", "what blocks it now:", *_obstacles(life.obstacles)]
    if life.parts:
        lines += ["", "time by phase:", *map(_part, life.parts)]
    if life.num_draft_tokens or life.num_more_tokens:
        lines.append("multiple tokens per step: " + "; ".join(_more_tokens(life)))
    return lines


def _more_tokens(life: RequestLife) -> Iterator[str]:
    """Yields counts of draft and further tokens, and the output tokens per step that had output."""
    if life.num_draft_tokens:
        num_accepted = life.num_accepted_draft_tokens
        yield f"{_counted(life.num_draft_tokens, 'draft token')}, {num_accepted} accepted"
    if num_run_ahead := life.num_more_tokens - life.num_accepted_draft_tokens:
        yield f"{num_run_ahead} by run-ahead"
    first, last = life.events[0].numbers, life.events[-1].numbers
    num_tokens = last.get("num_output_tokens", 0) - first.get("num_resumed_tokens", 0)
    if num_steps := max(0, num_tokens - life.num_more_tokens):
        yield f"{num_tokens / num_steps:.2f} tokens per step with output"


def _part(part: LifePart) -> str:
    why = because(part.reason, part.executor) if part.reason else printable(part.executor)
    return f"{seconds(part.duration_s):>13} {part.phase:20} {why}".rstrip()


def _obstacles(obstacles: Iterable[Obstacle]) -> list[str]:
    return [
        f"  {printable(each.executor)}: {because(each.reason, each.executor)}" for each in obstacles
    ] or [f"  {because('no_executor', '')}"]


def _unknown_to_journal(request_id: str, explanation: Explanation) -> Iterator[str]:
    yield f"unknown request: {printable(request_id)}"
    yield (
        f"the journal has {explanation.num_living + explanation.num_ended} requests; it lacks those"
        " that were refused or ended before the file begins (FILE.1 holds the part before FILE)"
    )
    yield from _similar_ids(explanation)


def _unknown(request_id: str, explanation: Explanation) -> Iterator[str]:
    yield f"unknown request: {printable(request_id)}"
    if not explanation.num_kept_at_most:
        yield "this scheduler keeps no history: start it with --remember-requests above 0"
        return
    num_ended, num_kept = explanation.num_ended, explanation.num_kept_at_most
    yield (
        f"the scheduler knows {explanation.num_living} unfinished and {num_ended} ended requests;"
        f" it keeps the last {num_kept} ended ones (--remember-requests)"
    )
    dropped = "ended and was dropped from the history, or " if num_ended >= num_kept else ""
    yield (
        f"if the id is right, the request {dropped}was sent before this scheduler started, or to"
        " another one, or was refused by a gateway, whose response gave the reason"
    )
    yield from _similar_ids(explanation)


def _similar_ids(explanation: Explanation) -> Iterator[str]:
    if explanation.near_request_ids:
        yield "similar ids: " + ", ".join(map(printable, explanation.near_request_ids))


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# -- names in a history as text --------------------------------------------------------------------

# Reasons why a request does not proceed; `{}` is the executor.
_BECAUSE: Mapping[str, str] = MappingProxyType(
    {
        "": "nothing blocked it",
        "behind_others": "other requests were ahead of it in the queue",
        "no_executor": "no executor accepted requests",
        "about_to_begin": "it was about to start",
        "awaits_better": "a busy executor needs less computation for it than {}",
        "budget": "other prompts used the token budget of {}",
        "others_wait_there": "other requests that waited at {} went first",
        "blocks_on_their_way": "steps in flight at {} were about to free blocks",
        "blocks": "{} had too few free KV blocks",
        "rows": "{} had no free row",
        "bytes": "its sampling parameters would have exceeded the limit for all rows of {}",
        "share": "its tenant had used its share of {}",
        "adapter_slot": "{} had no free slot for its adapter",
        "adapter_load": "{} was loading its adapter",
        "adapter_failed": "{} could not load its adapter",
        "pool": "the whole KV cache of {} is too small for it",
        "results": "steps in flight at {} still included it",
        "does_not_fit": "no registered executor could ever run it",
        "urgency": "a more urgent request needed its place at {}",
        "not_recorded": "of a reason that the journal does not record",
        "begins_sooner_elsewhere": "an executor other than {} could start it sooner",
        "drained": "{} was drained",
        "failed_there": "it failed at {} and is retried at another executor",
        "last_executor": "it may have crashed executors, and {} is the last one until others"
        " return",
        "withdrawn": "{} was withdrawn, as its results were wrong",
        "executor_lost": "{} was lost",
        "step_failed": "a step of {} failed",
        "quarantined": "it may have crashed executors, so it runs alone",
        "came_through": "it ran alone for as many tokens as required",
        "another_failed": "another request crashed the executors",
        "again": "{} had to recompute known tokens",
    }
)
# Reasons why a request was assigned to the executor `{}`.
_ASSIGNED_FOR: Mapping[str, str] = MappingProxyType(
    {
        "only_one": "only {} could start it soon",
        "most_cached": "{} has more of it cached than others",
        "soonest": "{} has less work ahead of it than others",
        "as_good_as_others": "{} was as suitable as others",
        "better_is_busy": "{} could start it; waiting for a better but busy one was not worthwhile",
        "waited_long_enough": "{} could start it; it had waited long enough for a better but busy"
        " one",
        "others_yield": "less urgent requests at {} make room for it",
        "no_room_anywhere": "no executor had room for it; it is first in the queue of {}",
        "tried_alone": "{} runs the requests in quarantine",
        "retried": "it failed at an executor other than {}",
    }
)
_ENDS: Mapping[str, str] = MappingProxyType(
    {
        "stop": "stop (stop token or stop string)",
        "length": "length (max_tokens reached)",
        "model_length": "model_length (limit of the model or of the KV cache reached)",
        "aborted": "aborted (by the client)",
        "abandoned": "abandoned (the client disconnected)",
        "EXECUTOR_LOST_REPEATEDLY": "EXECUTOR_LOST_REPEATEDLY (executors were lost or steps"
        " failed repeatedly while it ran, also while it ran alone)",
    }
)
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "refused": "refused",
        "received": "received",
        "waits": "waits",
        "assigned": "assigned",
        "began": "began",
        "first_token": "first token",
        "preempted": "preempted",
        "swapped_out": "swapped out",
        "swapped_in": "swapped in",
        "kv_lost": "KV lost",
        "taken_back": "back to the queue",
        "executor_lost": "executor lost",
        "quarantined": "quarantined",
        "acquitted": "acquitted",
        "resumed": "resumed",
        "ended": "ended",
    }
)
_NUMBERS: Mapping[str, Callable[[int], str]] = MappingProxyType(
    {
        "num_waiting": lambda n: f"{n} ahead of it",
        "num_chunks": lambda n: f"in {_counted(n, 'step')}",
        "num_prompt_tokens": lambda n: _counted(n, "prompt token"),
        "num_resumed_tokens": lambda n: f"{_counted(n, 'resumed token')}",
        "num_tokens": lambda n: f"{_counted(n, 'token')} known",
        "num_cached": lambda n: f"{n} of them in the prefix cache",
        "num_on_host": lambda n: f"{n} of these in the host pool",
        "num_output_tokens": lambda n: _counted(n, "output token"),
        "num_more_tokens": lambda n: f"{n} of them beyond one per step",
        "num_drafts": lambda n: _counted(n, "draft token"),
        "num_accepted": lambda n: f"{n} of them accepted",
        "num_trials": lambda n: f"until it has {_counted(n, 'token')} alone",
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
    if event.kind == "assigned":
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
    known = _ASSIGNED_FOR.get(event.reason)
    if known is None and event.reason:
        yield printable(event.reason)
    yield where if known is None else known.format(where)
    if num_cached := numbers.get("num_cached"):
        yield f"{_counted(num_cached, 'token')} of it cached there"
    if num_ahead := numbers.get("num_ahead"):
        yield f"{_counted(num_ahead, 'prompt token')} ahead of it there"
    if num_running := numbers.get("num_running"):
        yield f"{_counted(num_running, 'sequence')} running there"
    if "cost_elsewhere_us" in numbers:
        own, other = (seconds(numbers.get(f"cost{at}_us", 0) / 1e6) for at in ("", "_elsewhere"))
        elsewhere = numbers.get("num_cached_elsewhere", 0)
        yield f"estimated time to first token: {own}, elsewhere {other} with {elsewhere} cached"


def doing(part: LifePart) -> str:
    """Returns the current activity of an unfinished request."""
    match part.phase:
        case "prompt":
            return f"{printable(part.executor)} computes its prompt"
        case "tokens":
            return f"{printable(part.executor)} generates its tokens"
        case "swapped":
            return f"it is swapped out because {because(part.reason, part.executor)}"
        case _:
            return f"it waits because {because(part.reason, part.executor)}"


def seconds(duration_s: float) -> str:
    """Formats a duration with few digits."""
    if duration_s < 1:
        return f"{duration_s * 1000:.3g} ms"
    return f"{duration_s:.1f} s" if duration_s < 600 else f"{duration_s / 60:.0f} min"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
