"""Segments and the advance of windows equal those of transformers; subtitles have their forms."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from splitserve_gateway.audio import Subtitle, as_srt, as_vtt, cut_window

FIRST, NUM_POSITIONS = 100, 50


def windows(count: int) -> list[list[int]]:
    """Outputs of windows, with timestamps alone, in pairs, and at any place."""
    draw = random.Random(3)
    found: list[list[int]] = []
    for _ in range(count):
        tokens, time = [], draw.randint(0, 9)
        for _ in range(draw.randint(1, 4)):
            tokens += [FIRST + time, *(draw.randrange(FIRST) for _ in range(draw.randint(1, 3)))]
            time = min(NUM_POSITIONS, time + draw.randint(0, 12))
            tokens += [FIRST + time] if draw.random() < 0.8 else []
        found.append(tokens[: draw.randint(1, len(tokens))])
    return found


def expected(tokens: list[int]) -> tuple[list[tuple[float, float]], int]:
    """Starts and ends in positions, and the advance in frames, by transformers."""
    from transformers import WhisperForConditionalGeneration

    untyped: Any = WhisperForConditionalGeneration
    segments, advance = untyped._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[{}],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([2 * NUM_POSITIONS]),
        time_precision=1.0,
        time_precision_features=0.5,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    return [(float(s["start"]), float(s["end"])) for s in segments], int(advance)


@pytest.mark.parametrize("tokens", windows(80), ids=str)
def test_window_is_cut_as_by_transformers(tokens: list[int]) -> None:
    spans, position = cut_window(tokens, FIRST, NUM_POSITIONS)
    segments, advance = expected(tokens)
    assert [(span.start, span.end) for span in spans] == segments
    # Without an advance, transformers would never come to an end.
    assert (NUM_POSITIONS if position is None else position) * 2 == (advance or 2 * NUM_POSITIONS)


def test_window_without_tokens_is_one_empty_segment() -> None:
    [span], position = cut_window([], FIRST, NUM_POSITIONS)
    assert (span.start, span.end, span.token_ids, position) == (0, NUM_POSITIONS, (), None)


def test_subtitles_have_the_forms_of_their_files() -> None:
    subtitles = [Subtitle(0.0, 1.5, " One\n\ntwo"), Subtitle(3661.25, 3662.0, " a --> b")]
    assert as_srt(subtitles) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne two\n\n2\n01:01:01,250 --> 01:01:02,000\na -> b\n\n"
    )
    assert as_vtt(subtitles) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne two\n\n"
        "01:01:01.250 --> 01:01:02.000\na -> b\n\n"
    )
