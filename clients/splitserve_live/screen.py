"""The state of a scheduler as text for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_live.state import LiveExecutor, LiveState, Pool
from splitserve_live.words import BLOCK_STATES, ROW_KINDS, reasons_of_all, state_word, why
from splitserve_rpc.printable import printable

# By state and by kind: a letter, so that it is read without colour, and a colour.
_BLOCKS = (("·", "bright_black"), ("h", "blue"), ("S", "yellow"), ("c", "green"),
           ("g", "magenta"), ("M", "red"))  # fmt: skip
_KINDS = (("", ""), ("P", "yellow"), ("d", "blue"), ("D", "magenta"), ("r", "green"))


# Why the next waits, by executors.
_MAX_REASONS = 4


@dataclass(frozen=True, slots=True)
class _Detail:
    """How much is said of an executor: lines of a map (0: nothing of its pools), rows, steps."""

    num_map_lines: int
    num_rows: int
    num_steps: int


# What is left out first where there is little room.
_DETAILS = (
    _Detail(num_map_lines=6, num_rows=8, num_steps=3),
    _Detail(num_map_lines=6, num_rows=4, num_steps=1),
    _Detail(num_map_lines=3, num_rows=0, num_steps=1),
    _Detail(num_map_lines=1, num_rows=0, num_steps=0),
    _Detail(num_map_lines=0, num_rows=0, num_steps=0),
)


def screen(state: LiveState, width: int, height: int | None = None) -> RenderableType:
    """One picture of it, `width` characters wide; not higher than `height` lines, if that is given.

    With less room less is said of each executor, in the end a line, and of no more than fit.
    """
    executors = list(state.executors.values())
    head = [_title(state), *_queue(state)]
    if not executors:
        head.append(Text("no executor serves"))
    for detail in _DETAILS:
        said = (_executor(state, executor, width, detail) for executor in executors)
        picture = Group(*head, *chain.from_iterable(said), _legend())
        if height is None or _height(picture, width) <= height:
            return picture
    head.append(Text(""))
    room = max(1, (height or 0) - _height(Group(*head), width))
    lines = [_brief(executor) for executor in executors]
    if len(lines) > room:
        lines[room - 1 :] = [Text(f"and {len(lines) - room + 1} more executors")]
    return Group(*head, *lines)


def _height(picture: RenderableType, width: int) -> int:
    console = Console(width=width)
    return len(console.render_lines(picture, pad=False))


def _title(state: LiveState) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(state.frame.unix_ms / 1000))
    return Text(f"splitserve top   {clock}", style="bold")


def _brief(executor: LiveExecutor) -> Text:
    told, counts = executor.told, Counter(executor.device.states)
    num_used = len(executor.device.states) - counts[0] - counts[3]
    return Text(
        f"{printable(told.address)}  {state_word(told.state)}  {len(set(told.running))} running, "
        f"{told.num_waiting} waiting, {len(told.swapped)} swapped, "
        f"{num_used} of {len(executor.device.states)} blocks used",
        no_wrap=True,
    )


def _executor(
    state: LiveState, executor: LiveExecutor, width: int, detail: _Detail
) -> Iterator[RenderableType]:
    told = executor.told
    yield Text(f"\n{printable(told.address)}  {state_word(told.state)}", style="bold")
    num_running = len(set(told.running))
    yield Text(
        f"{num_running} running in {len(told.running)} of {told.max_num_seqs} rows, "
        f"{told.num_waiting} waiting, {len(told.swapped)} swapped, {told.num_steps} steps, "
        f"{told.num_preemptions} preemptions"
    )
    if told.reason.lack:
        next_here = state.request(next(iter((*told.swapped, *told.waiting)), 0))
        yield Text(f"next here is {printable(next_here.request_id)}: {why(told.reason)}")
    for name, pool in (("device", executor.device), ("host", executor.host)):
        if pool.states and detail.num_map_lines:
            yield _pool(name, pool, width, detail.num_map_lines)
    latest = list(executor.steps)
    for step in latest[len(latest) - min(detail.num_steps, len(latest)) :]:
        kinds = Counter(step.kinds)
        rows = ", ".join(f"{n} {_kind_word(kind)}" for kind, n in sorted(kinds.items()))
        line = Text(f"step {step.step_id}  {step.round_trip_us / 1000:.1f} ms  {rows}  ")
        for kind in step.kinds[: max(0, width - len(line))]:
            line.append(*_mark(_KINDS, kind))
        yield line
    if told.running and detail.num_rows:
        yield _rows(state, told, detail.num_rows)


def _pool(name: str, pool: Pool, width: int, num_map_lines: int) -> Text:
    counts = Counter(pool.states)
    parts = (f"{counts[n]} {word}" for n, word in enumerate(BLOCK_STATES) if counts[n])
    text = Text(f"{name}: {len(pool.states)} blocks of {pool.block_size} tokens: ")
    text.append(", ".join(parts))
    # Of many blocks a character stands for several: for what most of them are.
    per_mark = -(-len(pool.states) // (width * num_map_lines))
    for start in range(0, len(pool.states), per_mark):
        if start // per_mark % width == 0:
            text.append("\n")
        part = pool.states[start : start + per_mark]
        text.append(*_mark(_BLOCKS, Counter(part).most_common(1)[0][0]))
    return text


def _rows(state: LiveState, told: live.LiveExecutor, most: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("REQUEST", "TENANT", "PROMPT", "TOKENS", "COMPUTED"):
        table.add_column(heading, justify="left" if heading in ("REQUEST", "TENANT") else "right")
    running = state.requests(told.running)
    each = zip(running, told.num_tokens, told.num_computed, strict=True)
    for number, (request, known, computed) in enumerate(each):
        if number == most:
            table.add_row(f"and {len(running) - most} more")
            break
        table.add_row(
            printable(request.request_id),
            printable(request.tenant),
            *(str(value) for value in (request.num_prompt_tokens, known, computed)),
        )
    return table


def _queue(state: LiveState) -> Iterator[RenderableType]:
    frame = state.frame
    if not frame.waiting:
        return
    first = state.request(frame.waiting[0])
    line = f"queue: {frame.num_waiting} wait for an executor; "
    line += f"next is {printable(first.request_id)} ({first.num_prompt_tokens} tokens)"
    yield Text(line, style="bold")
    for sentence in reasons_of_all(frame.reasons)[:_MAX_REASONS]:
        yield Text(f"  {sentence}")


def _legend() -> Text:
    text = Text("\n")
    for marks, words in ((_BLOCKS, BLOCK_STATES), (_KINDS, ROW_KINDS)):
        for (mark, style), word in zip(marks, words, strict=True):
            if mark:
                text.append(mark, style).append(f" {word}  ")
    return text


def _mark(marks: tuple[tuple[str, str], ...], number: int) -> tuple[str, str]:
    return marks[number] if number < len(marks) else ("?", "")


def _kind_word(kind: int) -> str:
    return ROW_KINDS[kind] if kind < len(ROW_KINDS) else str(kind)
