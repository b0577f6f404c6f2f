"""What `splitserve top` draws, and the words of both pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import splitserve_live
from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_live.frames import frame_line
from splitserve_live.screen import screen
from splitserve_live.state import LiveState
from splitserve_live.words import BLOCK_STATES, ROW_KINDS, lack_word, state_word, why

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
    """As `some_frame`, of several executors; somebody waits at each."""
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
def test_screen_fits_and_shows_the_queue_whatever_the_size_of_the_terminal(
    width: int, height: int, number: int
) -> None:
    lines = drawn(many_executors(number), width, height).splitlines()
    text = "\n".join(lines)
    assert len(lines) <= height
    assert "queue: 1 wait" in text
    assert number < 1 or "127.0.0.1:1" in text
    left_out = [int(found) for found in re.findall(r"and (\d+) more executors", text)]
    shown = len(re.findall(r"^127\.0\.0\.1:\d+  serving", text, re.MULTILINE))
    assert shown + sum(left_out) == number


def test_screen_shows_a_map_of_every_executor_when_there_is_room_for_little_else() -> None:
    text = drawn(many_executors(2), 80, 20)
    assert text.count("hS···c··") == 2
    assert text.count("next here is eight\\x1b[31m: it needs 9 blocks, and 5 are free") == 2
    assert "REQUEST" not in text


def test_reason_is_said_once_when_several_executors_have_it() -> None:
    assert "  others that wait there go first (127.0.0.1:1, 127.0.0.1:2)\n" in drawn(
        many_executors(2)
    )
    assert "  others that wait there go first (8 executors)\n" in drawn(many_executors(8))


def test_screen_says_that_no_executor_serves() -> None:
    assert "no executor serves" in drawn(live.WatchSchedulerResponse())


def test_frame_line_is_one_line_of_json_with_whole_numbers_only() -> None:
    line = frame_line(some_frame())
    assert line.count(b"\n") == 1
    (executor,) = json.loads(line)["executors"]
    assert executor["life"] == str(2**62)
    assert executor["device"]["states"] == [1, 2, 3]


@pytest.mark.parametrize("lack", [number for number in live.LiveLack.values() if number])
def test_every_reason_has_a_sentence_here_and_on_the_page(lack: int) -> None:
    assert "it lacks" not in why(live.LiveReason(lack=live.LiveLack.Name(lack)))
    assert f"\n  {lack_word(lack)}: " in (STATIC / "words.js").read_text()


@pytest.mark.parametrize("state", [number for number in live.LiveState.values() if number])
def test_every_state_of_an_executor_has_words_on_the_page(state: int) -> None:
    assert f"\n  {state_word(state)}: " in (STATIC / "executor_card.js").read_text()


def test_page_and_terminal_use_the_same_words_for_blocks_and_rows() -> None:
    text = (STATIC / "words.js").read_text()
    assert json.dumps(list(BLOCK_STATES)) in text
    assert json.dumps(list(ROW_KINDS)) in text
