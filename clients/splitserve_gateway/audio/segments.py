"""Segments of a transcript: cut out of the output tokens of a window, and shown as subtitles.

Source: Radford 2022, "Robust speech recognition via large-scale weak supervision", section 4.5; the
windows advance as in `generate` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a segment, timestamps included, and its start and end in positions of a window."""

    start: float
    end: float
    token_ids: tuple[int, ...]


def cut_window(
    token_ids: Sequence[int], first_timestamp: int, num_positions: int
) -> tuple[list[Span], int | None]:
    """Returns the segments of a window, and the position at which the next window begins.

    The position is None if it is the end of this window.

    `token_ids`: output tokens without the one that ends them. Tokens from `first_timestamp` on are
    timestamps. `num_positions`: of the window's audio. What follows the last pair of timestamps is
    cut off by the window's end, and belongs to the next window.
    """
    is_timestamp = [token_id >= first_timestamp for token_id in token_ids]
    pairs = [i for i in range(1, len(token_ids)) if is_timestamp[i - 1] and is_timestamp[i]]
    if not pairs:
        return [_only_span(token_ids, is_timestamp, first_timestamp, num_positions)], None
    # Without a pair at the end, a last timestamp says that no speech follows.
    ends_once = is_timestamp[-2:] == [False, True]
    ends = [*pairs, len(token_ids)] if ends_once else pairs
    spans, begin = [], 0
    for end in ends:
        tokens = tuple(token_ids[begin:end])
        spans.append(Span(tokens[0] - first_timestamp, tokens[-1] - first_timestamp, tokens))
        begin = end
    if ends_once:
        return spans, None
    # At the start of this window it would be the same window again.
    return spans, token_ids[pairs[-1] - 1] - first_timestamp or None


def _only_span(
    token_ids: Sequence[int],
    is_timestamp: Sequence[bool],
    first_timestamp: int,
    num_positions: int,
) -> Span:
    """Returns all tokens as one segment, which ends at the last timestamp that is not 0."""
    ends = [t for t, is_time in zip(token_ids, is_timestamp, strict=True) if is_time]
    end = ends[-1] - first_timestamp if ends else 0
    return Span(0, end or num_positions, tuple(token_ids))


# -- Subtitles -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subtitle:
    """Text that is shown from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    text: str


def as_srt(subtitles: Iterable[Subtitle]) -> str:
    """Returns a file in the format SubRip."""
    return "".join(
        f"{number}\n{_time(each.start_s, ',')} --> {_time(each.end_s, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(subtitles, 1)
    )


def as_vtt(subtitles: Iterable[Subtitle]) -> str:
    """Returns a file in the format WebVTT."""
    return "WEBVTT\n\n" + "".join(
        f"{_time(each.start_s, '.')} --> {_time(each.end_s, '.')}\n{_line(each)}\n\n"
        for each in subtitles
    )


def _line(subtitle: Subtitle) -> str:
    """Returns the text in one line, without the arrow that would look like times."""
    return " ".join(subtitle.text.split()).replace("-->", "->")


def _time(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return (
        f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{mark}"
        f"{milliseconds % 1000:03d}"
    )
