"""The life of a request for people: what it comes down to, then what happened when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from splitserve_cli.explain_words import because, details_of, doing, ending, kind_of, seconds
from splitserve_client.explanations import (
    Explanation,
    LifeEvent,
    LifePart,
    Obstacle,
    QueueExplanation,
    RequestLife,
)
from splitserve_rpc.printable import printable

_NUM_FIRST = 16
_NEARLY_ALL_RATIO = 0.95
_REFUSALS = "of which docs/operations.md says what to do (What is refused)"
_WAITING = ("queued", "given")
_OF_JOURNAL = (
    "from a journal: of requests that were there when the file begins, what happened before is not"
    " in it (FILE.1 has what was before FILE)"
)
_NOT_RECORDED = "not_recorded"


def describe_explanation(
    request_id: str, explanation: Explanation, *, is_of_journal: bool = False
) -> str:
    """All lives, or what is known instead."""
    if not explanation.lives:
        unknown = _unknown_to_journal if is_of_journal else _unknown
        return "\n".join(unknown(request_id, explanation)) + "\n"
    text = "\n".join("\n".join(_life(life)) + "\n" for life in explanation.lives)
    return f"{text}\n{_OF_JOURNAL}\n" if is_of_journal else text


def describe_queue(queue: QueueExplanation) -> str:
    """Why the first wait."""
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
    """What it comes down to, in a sentence or two."""
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
    """Guessed, right, run on; and what came of it for each step that brought any."""
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
