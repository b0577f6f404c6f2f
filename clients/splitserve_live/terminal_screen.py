"""State of a scheduler as text for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.text import Text

from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_common import printable
from splitserve_live.state import (
    BLOCK_STATES,
    ROW_KINDS,
    LiveExecutor,
    LiveState,
    Pool,
    reasons_of_all,
    state_word,
    why,
)

# By state and by kind: a letter, readable without colour, and a colour.
_BLOCKS = (("·", "bright_black"), ("h", "blue"), ("S", "yellow"), ("c", "green"),
           ("g", "magenta"), ("M", "red"))  # fmt: skip
_KINDS = (("", ""), ("P", "yellow"), ("d", "blue"), ("D", "magenta"), ("r", "green"))


# Limit of shown reasons why the next request waits.
_MAX_REASONS = 4
# Heights of a bar in a chart, from empty to full.
_BARS = " ▁▂▃▄▅▆▇█"
_POINT_S = 2
_CHART_WIDTH = 26


@dataclass(frozen=True, slots=True)
class _Detail:
    """Amount of detail per executor: lines of the block map (0: no pools at all), rows, steps."""

    num_map_lines: int
    num_rows: int
    num_steps: int


# Least detail first. With more room than the last needs, each amount grows up to the most.
_DETAILS = (
    _Detail(num_map_lines=0, num_rows=0, num_steps=0),
    _Detail(num_map_lines=1, num_rows=0, num_steps=0),
    _Detail(num_map_lines=1, num_rows=0, num_steps=1),
    _Detail(num_map_lines=1, num_rows=2, num_steps=1),
)
_MOST = _Detail(num_map_lines=6, num_rows=12, num_steps=10)
# Detail without a terminal, whose height would limit it.
_USUAL = _Detail(num_map_lines=6, num_rows=12, num_steps=3)


def screen(state: LiveState, width: int, height: int | None = None) -> RenderableType:
    """Renders the state, `width` characters wide and at most `height` lines high, if given.

    With less room, each executor gets less detail, down to one line, and executors beyond the
    height are only counted. With more room, executors get more detail.
    """
    executors = list(state.executors.values())
    head = [_title(state), *_totals(state), *_queue(state)]
    if not executors:
        head.append(_line("no executor is serving"))
    legend = _legend()

    def body(detail: _Detail) -> list[Text]:
        return [line for each in executors for line in _executor(state, each, width, detail)]

    if height is None:
        return Group(*head, *body(_USUAL), legend)
    room = height - len(head) - _height(legend, width)
    detail = next((each for each in reversed(_DETAILS) if len(body(each)) <= room), None)
    if detail is _DETAILS[-1]:
        detail = _grown(detail, lambda more: len(body(more)), room)
    if detail is not None:
        return Group(*head, *body(detail), legend)
    room = max(1, height - len(head) - 1)
    lines = [_brief(executor) for executor in executors]
    if len(lines) > room:
        lines[room - 1 :] = [_line(f"and {len(lines) - room + 1} more executors")]
    return Group(*head, _line(""), *lines)


def _grown(detail: _Detail, num_lines: Callable[[_Detail], int], room: int) -> _Detail:
    """Returns `detail` with as much more as fits into `room` lines; rows first."""
    for name in ("num_rows", "num_map_lines", "num_steps"):
        while getattr(detail, name) < getattr(_MOST, name):
            more = replace(detail, **{name: getattr(detail, name) + 1})
            if num_lines(more) > room:
                break
            detail = more
    return detail


def _line(text: str, style: str = "") -> Text:
    """Returns a single line, cut at the width of the terminal."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _height(text: Text, width: int) -> int:
    return len(Console(width=width).render_lines(text, pad=False))


def _title(state: LiveState) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(state.frame.unix_ms / 1000))
    return _line(f"splitserve top   {clock}", "bold")


def _totals(state: LiveState) -> Iterator[Text]:
    """Yields the totals of all executors: current values, and charts of the last minute."""
    latest = [executor.latest for executor in state.executors.values()]
    blocks = [executor.device.counts for executor in state.executors.values()]
    num_blocks = sum(map(sum, blocks))
    num_used = num_blocks - sum(counts[0] + counts[3] for counts in blocks)
    num_waiting = state.frame.num_waiting + sum(each.num_waiting for each in latest)
    parts = [
        f"{sum(len(set(each.running)) for each in latest)} running",
        f"{num_waiting} waiting",
        f"{sum(len(each.swapped) for each in latest)} swapped",
        f"KV {_share(num_used, num_blocks)}",
    ]
    latency = state.frame.time_to_first_token
    if latency.count:
        parts.append(f"TTFT p50 {_duration(latency.p50_us)} p99 {_duration(latency.p99_us)}")
    yield _line(", ".join(parts))
    points = list(state.history)[-_CHART_WIDTH:]
    if points:
        tokens = [point.num_tokens // _POINT_S for point in points]
        waiting = [point.num_waiting for point in points]
        text = _line("tokens/s ").append(_chart(tokens), "blue")
        text.append(f" {tokens[-1]}  waiting ").append(_chart(waiting), "yellow")
        yield text.append(f" {waiting[-1]}")


def _chart(values: Sequence[int]) -> str:
    """Returns a bar for each value; the highest value fills the height of the line."""
    most, steps = max(values), len(_BARS) - 1
    return "".join(_BARS[-(-value * steps // most)] if most else _BARS[0] for value in values)


def _share(part: int, whole: int) -> str:
    """Formats a percentage; shows 0 % and 100 % for exact values only."""
    percent = round(100 * part / whole) if whole else 0
    if part and not percent:
        return "<1 %"
    return ">99 %" if part < whole and percent == 100 else f"{percent} %"


def _duration(us: int) -> str:
    if us < 1_000_000:
        return f"{us / 1000:.0f} ms" if us >= 10_000 else f"{us / 1000:.1f} ms"
    return f"{us / 1_000_000:.1f} s"


def _brief(executor: LiveExecutor) -> Text:
    latest, counts = executor.latest, executor.device.counts
    num_used = len(executor.device.states) - counts[0] - counts[3]
    return _line(
        f"{printable(latest.address)}  {state_word(latest.state)}  "
        f"{len(set(latest.running))} running, "
        f"{latest.num_waiting} waiting, {len(latest.swapped)} swapped, "
        f"{num_used} of {len(executor.device.states)} blocks used"
    )


def _executor(
    state: LiveState, executor: LiveExecutor, width: int, detail: _Detail
) -> Iterator[Text]:
    """Yields the lines of an executor; lines that do not fit the width are cut."""
    latest = executor.latest
    yield _line("")
    yield _line(f"{printable(latest.address)}  {state_word(latest.state)}", "bold")
    num_running = len(set(latest.running))
    yield _line(
        f"{num_running} running in {len(latest.running)} of {latest.max_num_seqs} rows, "
        f"{latest.num_waiting} waiting, {len(latest.swapped)} swapped, {latest.num_steps} steps, "
        f"{latest.num_preemptions} preemptions"
    )
    if latest.reason.lack:
        next_here = state.request(next(iter((*latest.swapped, *latest.waiting)), 0))
        yield _line(f"next here is {printable(next_here.request_id)}: {why(latest.reason)}")
    for name, pool in (("device", executor.device), ("host", executor.host)):
        if pool.states and detail.num_map_lines:
            yield from _pool(name, pool, width, detail.num_map_lines)
    steps = list(executor.steps)
    for step in steps[len(steps) - min(detail.num_steps, len(steps)) :]:
        kinds = Counter(step.kinds)
        rows = ", ".join(f"{n} {_kind_word(kind)}" for kind, n in sorted(kinds.items()))
        line = _line(f"step {step.step_id}  {step.round_trip_us / 1000:.1f} ms  {rows}  ")
        yield _add_marks(line, _KINDS, step.kinds[: max(0, width - len(line))])
    if latest.running and detail.num_rows:
        yield from _rows(state, latest, detail.num_rows)


def _pool(name: str, pool: Pool, width: int, num_map_lines: int) -> Iterator[Text]:
    counts = pool.counts
    parts = (f"{counts[n]} {word}" for n, word in enumerate(BLOCK_STATES) if counts[n])
    shown = bytes(pool.states[: pool.num_shown])
    first = f" (map: first {len(shown)})" if len(shown) < len(pool.states) else ""
    if name == "host" and counts[0] == len(pool.states):
        # The host pool is often unused: an empty map shows nothing.
        shown, first = b"", ""
    yield _line(
        f"{name}: {len(pool.states)} blocks of {pool.block_size} tokens{first}: " + ", ".join(parts)
    )
    # In a map of many blocks a character stands for several, and shows their most common state.
    per_mark = max(1, -(-len(shown) // (width * num_map_lines)))
    if per_mark > 1:
        shown = bytes(
            Counter(shown[start : start + per_mark]).most_common(1)[0][0]
            for start in range(0, len(shown), per_mark)
        )
    for start in range(0, len(shown), width):
        yield _add_marks(_line(""), _BLOCKS, shown[start : start + width])


def _rows(state: LiveState, latest: live.LiveExecutor, most: int) -> Iterator[Text]:
    running = state.requests(latest.running)
    # The last line shows the number of further requests.
    num_shown = len(running) if len(running) <= most else most - 1
    names = [(printable(each.request_id), printable(each.tenant)) for each in running[:num_shown]]
    table: list[tuple[str, ...]] = [("REQUEST", "TENANT", "PROMPT", "TOKENS", "COMPUTED")]
    for row, (request_id, tenant) in enumerate(names):
        numbers = running[row].num_prompt_tokens, latest.num_tokens[row], latest.num_computed[row]
        table.append((request_id, tenant, *(str(number) for number in numbers)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for number, row_texts in enumerate(table):
        cells = [
            text.ljust(wide) if column < 2 else text.rjust(wide)
            for column, (text, wide) in enumerate(zip(row_texts, widths, strict=True))
        ]
        yield _line("  ".join(cells), "" if number else "bold")
    if num_shown < len(running):
        yield _line(f"and {len(running) - num_shown} more")


def _queue(state: LiveState) -> Iterator[Text]:
    frame = state.frame
    if not frame.waiting:
        return
    first = state.request(frame.waiting[0])
    line = f"queue: {frame.num_waiting} waiting for an executor; "
    line += f"next is {printable(first.request_id)} ({first.num_prompt_tokens} tokens)"
    yield _line(line, "bold")
    for sentence in reasons_of_all(frame.reasons)[:_MAX_REASONS]:
        yield _line(f"  {sentence}")


def _legend() -> Text:
    text = Text("\n")
    for marks, words in ((_BLOCKS, BLOCK_STATES), (_KINDS, ROW_KINDS)):
        for (mark, style), word in zip(marks, words, strict=True):
            if mark:
                text.append(mark, style).append(f" {word}  ")
    return text


def _add_marks(text: Text, marks: tuple[tuple[str, str], ...], numbers: bytes) -> Text:
    """Appends a mark for each of `numbers` to `text`, and returns `text`."""
    for number, alike in groupby(numbers):
        mark, style = marks[number] if number < len(marks) else ("?", "")
        text.append(mark * len(list(alike)), style)
    return text


def _kind_word(kind: int) -> str:
    return ROW_KINDS[kind] if kind < len(ROW_KINDS) else str(kind)
