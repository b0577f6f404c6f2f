"""The state of a scheduler as text for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitserve_live.state import LiveExecutor, LiveState, Pool
from splitserve_live.words import BLOCK_STATES, ROW_KINDS, state_word, why
from splitserve_rpc.printable import printable

# By state and by kind: a letter, so that it is read without colour, and a colour.
_BLOCKS = (("·", "bright_black"), ("h", "blue"), ("S", "yellow"), ("c", "green"),
           ("g", "magenta"), ("M", "red"))  # fmt: skip
_KINDS = (("", ""), ("P", "yellow"), ("d", "blue"), ("D", "magenta"), ("r", "green"))
_MAX_MAP_LINES = 6
_MAX_ROWS = 8
_NUM_STEPS = 3


def screen(state: LiveState, width: int) -> RenderableType:
    """One picture of it, `width` characters wide."""
    frame = state.frame
    clock = time.strftime("%H:%M:%S", time.localtime(frame.unix_ms / 1000))
    parts: list[RenderableType] = [Text(f"splitserve top   {clock}", style="bold")]
    if not state.executors:
        parts.append(Text("no executor serves"))
    parts += [part for each in state.executors.values() for part in _executor(state, each, width)]
    parts += _queue(state)
    parts.append(_legend())
    return Group(*parts)


def _executor(state: LiveState, executor: LiveExecutor, width: int) -> Iterator[RenderableType]:
    told = executor.told
    yield Text(f"\n{printable(told.address)}  {state_word(told.state)}", style="bold")
    num_running = len(set(told.running))
    yield Text(
        f"{num_running} running in {len(told.running)} of {told.max_num_seqs} rows, "
        f"{told.num_waiting} waiting, {len(told.swapped)} swapped, {told.num_steps} steps, "
        f"{told.num_preemptions} preemptions"
    )
    if told.reason.lack:
        yield Text(f"next here: {why(told.reason)}")
    for name, pool in (("device", executor.device), ("host", executor.host)):
        if pool.states:
            yield _pool(name, pool, width)
    for step in list(executor.steps)[-_NUM_STEPS:]:
        kinds = Counter(step.kinds)
        rows = ", ".join(f"{n} {_kind_word(kind)}" for kind, n in sorted(kinds.items()))
        line = Text(f"step {step.step_id}  {step.round_trip_us / 1000:.1f} ms  {rows}  ")
        for kind in step.kinds[: max(0, width - len(line))]:
            line.append(*_mark(_KINDS, kind))
        yield line
    if told.running:
        yield _rows(state, told.running, told.num_tokens, told.num_computed)


def _pool(name: str, pool: Pool, width: int) -> Text:
    counts = Counter(pool.states)
    parts = (f"{counts[n]} {word}" for n, word in enumerate(BLOCK_STATES) if counts[n])
    text = Text(f"{name}: {len(pool.states)} blocks of {pool.block_size} tokens: ")
    text.append(", ".join(parts))
    # Of many blocks a character stands for several: for what most of them are.
    per_mark = -(-len(pool.states) // (width * _MAX_MAP_LINES))
    for start in range(0, len(pool.states), per_mark):
        if start // per_mark % width == 0:
            text.append("\n")
        part = pool.states[start : start + per_mark]
        text.append(*_mark(_BLOCKS, Counter(part).most_common(1)[0][0]))
    return text


def _rows(
    state: LiveState, running: Sequence[int], num_tokens: Sequence[int], num_computed: Sequence[int]
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("REQUEST", "TENANT", "PROMPT", "TOKENS", "COMPUTED"):
        table.add_column(heading, justify="left" if heading in ("REQUEST", "TENANT") else "right")
    each = zip(state.requests(running), num_tokens, num_computed, strict=True)
    for number, (request, known, computed) in enumerate(each):
        if number == _MAX_ROWS:
            table.add_row(f"and {len(running) - _MAX_ROWS} more")
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
    line = f"\nqueue: {frame.num_waiting} wait for an executor; "
    line += f"next is {printable(first.request_id)} ({first.num_prompt_tokens} tokens)"
    yield Text(line, style="bold")
    for reason in frame.reasons:
        yield Text(f"  {why(reason)}")


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
