"""Tests what `splitserve top` draws, and the words that it shares with the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import splitserve_live
from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_live import (
    BLOCK_STATES,
    ROW_KINDS,
    LiveState,
    Pool,
    frame_line,
    lack_word,
    screen,
    state_word,
    why,
)

STATIC = Path(splitserve_live.__file__).parent / "static"


def some_frame() -> live.WatchSchedulerResponse:
    pool = live.LivePool(
        num_blocks=8, block_size=16, changed=[0, 1, 5], states=bytes([1, 2, 3]), holders=[7, 7, 0]
    )
    step = live.LiveStep(step_id=12, round_trip_us=2500, rows=[7], kinds=bytes([2]), num_rows=1)
    executor = live.LiveExecutor(
        address="127.0.0.1:1",
        life=2**62,
        state=live.LIVE_STATE_SERVING,
        running=[7],
        num_tokens=[40],
        num_computed=[39],
        steps=[step],
        device=pool,
    )
    lacks = live.LiveReason(
        address="127.0.0.1:1", lack=live.LIVE_LACK_BLOCKS, num_needed=9, num_free=5
    )
    names = [live.LiveRequest(number=7, request_id="seven"), live.LiveRequest(number=8)]
    names[1].request_id = "eight\x1b[31m"
    return live.WatchSchedulerResponse(
        executors=[executor], waiting=[8], num_waiting=1, reasons=[lacks], new_requests=names
    )


def drawn(frame: live.WatchSchedulerResponse, width: int = 100, height: int | None = None) -> str:
    state = LiveState()
    state.take(frame)
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(screen(state, width, height))
    return capture.get()


def many_executors(number: int) -> live.WatchSchedulerResponse:
    frame = some_frame()
    (first,) = frame.executors
    first.waiting.append(8)
    first.reason.CopyFrom(frame.reasons[0])
    del frame.executors[:], frame.reasons[:]
    for port in range(1, number + 1):
        address = f"127.0.0.1:{port}"
        executor = frame.executors.add()
        executor.CopyFrom(first)
        executor.address = address
        frame.reasons.add(address=address, lack=live.LIVE_LACK_OTHERS_FIRST)
    return frame


def test_screen_shows_blocks_rows_steps_and_why_the_next_waits() -> None:
    text = drawn(some_frame())
    assert "127.0.0.1:1  serving" in text
    assert "hS···c··" in text
    assert "step 12  2.5 ms  1 decode  d" in text
    assert re.search(r"seven +0 +40 +39", text)
    assert "it needs 9 blocks, and 5 are free (127.0.0.1:1)" in text


def test_screen_does_what_no_name_of_a_request_says() -> None:
    assert "\x1b" not in drawn(some_frame())


@pytest.mark.parametrize("height", [10, 16, 24, 50])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 8, 40])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_screen_fits_any_terminal_and_shows_the_queue(width: int, height: int, number: int) -> None:
    lines = drawn(many_executors(number), width, height).splitlines()
    text = "\n".join(lines)
    assert len(lines) <= height
    assert "queue: 1 wait" in text
    assert number < 1 or "127.0.0.1:1" in text
    left_out = [int(found) for found in re.findall(r"and (\d+) more executors", text)]
    shown = len(re.findall(r"^127\.0\.0\.1:\d+  serving", text, re.MULTILINE))
    assert shown + sum(left_out) == number


def test_screen_shows_maps_first_when_room_is_short() -> None:
    text = drawn(many_executors(2), 80, 20)
    assert text.count("hS···c··") == 2
    assert text.count("next here is eight\\x1b[31m: it needs 9 blocks, and 5 are free") == 2
    assert "REQUEST" not in text


def busy_frame(num_running: int, num_blocks: int = 131_072) -> live.WatchSchedulerResponse:
    """One executor with large pools of which little is used, and a history."""
    frame = live.WatchSchedulerResponse()
    executor = frame.executors.add(address="127.0.0.1:1", state=live.LIVE_STATE_SERVING)
    for number in range(1, num_running + 1):
        frame.new_requests.add(number=number, request_id=f"chatcmpl-{number:032x}", tenant="")
        executor.running.append(number)
        executor.num_tokens.append(200)
        executor.num_computed.append(199)
    for pool in (executor.device, executor.host):
        pool.num_blocks, pool.block_size = num_blocks, 16
    executor.device.changed.extend(range(460))
    executor.device.states = bytes([1] * 460)
    executor.device.holders.extend([1] * 460)
    for number in range(20):
        executor.steps.add(step_id=number, rows=[1], kinds=bytes([2]), num_rows=1)
        frame.history.add(start_ms=2000 * number, num_tokens=100 * number, num_waiting=3)
    latency = frame.time_to_first_token
    latency.count, latency.p50_us, latency.p99_us = 9, 25_000, 1_250_000
    return frame


@pytest.mark.parametrize("num_running", [0, 3, 30])
def test_screen_fills_a_terminal_of_80_by_24_with_requests_first(num_running: int) -> None:
    lines = drawn(busy_frame(num_running), 80, 24).splitlines()
    # One before the executor, one before the legend, and no more.
    assert sum(not line.strip() for line in lines) == 2
    assert len(lines) == 24
    num_requests = sum(line.startswith("chatcmpl-") for line in lines)
    assert num_requests == {0: 0, 3: 3}.get(num_running, num_requests)
    assert num_requests >= min(num_running, 7)


def test_screen_tells_totals_time_to_first_token_and_history() -> None:
    text = drawn(busy_frame(3), 80, 24)
    assert "3 running, 0 waiting, 0 swapped, KV <1 %, TTFT p50 25 ms p99 1.2 s\n" in text
    assert re.search(r"^tokens/s  ▁.*█ 950  waiting █{20} 3$", text, re.MULTILINE)


def test_screen_shows_as_much_of_a_pool_as_is_used() -> None:
    lines = drawn(busy_frame(3), 100).splitlines()
    (first,) = [n for n, line in enumerate(lines) if line.startswith("device: 131072 blocks")]
    assert "(map: first 512)" in lines[first]
    marks = "".join(lines[first + 1 : first + 7])
    assert (marks.count("h"), marks.count("·")) == (460, 512 - 460)
    assert lines[first + 7] == "host: 131072 blocks of 16 tokens: 131072 free"


def test_counts_of_a_pool_follow_what_is_told_of_it() -> None:
    pool = Pool()
    pool.take(live.LivePool(num_blocks=200, changed=[3, 150], states=bytes([1, 3]), holders=[7, 0]))
    assert pool.counts[:6] == [198, 1, 0, 1, 0, 0]
    assert (pool.num_touched, pool.num_shown) == (151, 200)
    pool.take(live.LivePool(num_blocks=200, changed=[150], states=bytes([0]), holders=[0]))
    assert pool.counts[:6] == [199, 1, 0, 0, 0, 0]
    assert (pool.num_touched, pool.num_shown) == (4, 64)


def test_reason_is_said_once_when_several_executors_have_it() -> None:
    assert "  other requests waiting there go first (127.0.0.1:1, 127.0.0.1:2)\n" in drawn(
        many_executors(2)
    )
    assert "  other requests waiting there go first (8 executors)\n" in drawn(many_executors(8))


def test_screen_says_that_no_executor_serves() -> None:
    assert "no executor is serving" in drawn(live.WatchSchedulerResponse())


def test_frame_line_is_one_line_of_json_with_whole_numbers_only() -> None:
    line = frame_line(some_frame())
    assert line.count(b"\n") == 1
    (executor,) = json.loads(line)["executors"]
    assert executor["life"] == str(2**62)
    assert executor["device"]["states"] == [1, 2, 3]


@pytest.mark.parametrize("lack", [number for number in live.LiveLack.values() if number])
def test_every_reason_has_a_sentence_here_and_on_the_page(lack: int) -> None:
    assert f"it waits for {lack_word(lack)}" not in why(
        live.LiveReason(lack=live.LiveLack.Name(lack))
    )
    assert f"\n  {lack_word(lack)}: " in (STATIC / "words.js").read_text()


@pytest.mark.parametrize("state", [number for number in live.LiveState.values() if number])
def test_every_state_of_an_executor_has_words_on_the_page(state: int) -> None:
    assert f"\n  {state_word(state)}: " in (STATIC / "executor_card.js").read_text()


def test_page_and_terminal_use_the_same_words_for_blocks_and_rows() -> None:
    text = (STATIC / "words.js").read_text()
    assert json.dumps(list(BLOCK_STATES)) in text
    assert json.dumps(list(ROW_KINDS)) in text
