from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_client import StopStrings

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "75"))
PIECES = st.lists(st.text(alphabet="abc", max_size=3), max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=5)


def cut(
    pieces: list[str], stops: list[str], num_early: int, include: bool
) -> tuple[str, str | None]:
    """What is to be shown in the end, and the stop string, without any cleverness."""
    whole = ""
    for index, piece in enumerate(pieces):
        ends = range(len(whole) + 1, len(whole) + len(piece) + 1)
        whole += piece
        hits = [
            (end - len(stop), -len(stop), stop)
            for end in ends
            for stop in stops
            if whole[:end].endswith(stop)
        ]
        if hits and index >= num_early:
            start, _, found = min(hits)
            return whole[: start + len(found)] if include else whole[:start], found
    return whole, None


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(PIECES, STOPS, st.integers(0, 12), st.booleans())
def test_text_is_cut_alike_when_pieces_are_random(
    pieces: list[str], stops: list[str], num_early: int, include: bool
) -> None:
    filter_ = StopStrings(stops, include=include)

    shown = "".join(
        filter_.push(piece, may_end=index >= num_early) for index, piece in enumerate(pieces)
    )
    shown += filter_.finish()

    assert (shown, filter_.found) == cut(pieces, stops, num_early, include)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(PIECES, STOPS)
def test_only_a_possible_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    filter_ = StopStrings(stops)
    whole = shown = ""
    for piece in pieces:
        shown += filter_.push(piece)
        whole += piece
        if filter_.found is not None:
            return
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))} | {""}
        num_held = max(len(part) for part in beginnings if whole.endswith(part))
        assert shown == whole[: len(whole) - num_held]


def test_nothing_is_shown_after_the_end_when_more_text_comes() -> None:
    stops = StopStrings(["###"])

    assert [stops.push(text) for text in ("a#", "#", "b##", "#c", "d")] == ["a", "", "##b", "", ""]
    assert stops.found == "###"
    assert stops.finish() == ""


@pytest.mark.parametrize("repeated", ["a", "ab"])
def test_work_is_linear_in_the_text_when_stops_are_long(
    repeated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = StopStrings([(repeated * 1024)[:1023] + chr(200 + number) for number in range(64)])
    num_made = 0
    make_child = StopStrings._make_child

    def counted(*arguments: object) -> object:
        nonlocal num_made
        num_made += 1
        return make_child(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StopStrings, "_make_child", counted)
    for _ in range(2000):
        stops.push(repeated)

    assert num_made <= 2 * 2000 * len(repeated)
    assert len(stops.finish()) > 1020
