"""Rules for transcriptions: logits equal those of the processors of transformers."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.sampling import apply_transcription_rules
from executor_service.steps import ParamRows, SamplingParams, TranscriptionRules

VOCAB_SIZE, EOS, FIRST = 60, 30, 40
PROMPT = [31, 32, 33]


def processors(most: int | None, suppressed: list[int]) -> list[Any]:
    from transformers import SuppressTokensAtBeginLogitsProcessor
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    settings: Any = SimpleNamespace(
        no_timestamps_token_id=FIRST - 1, eos_token_id=EOS, max_initial_timestamp_index=most
    )
    return [
        SuppressTokensAtBeginLogitsProcessor(suppressed, begin_index=len(PROMPT)),
        WhisperTimeStampLogitsProcessor(settings, begin_index=len(PROMPT)),
    ]


def outputs(seed: int, count: int) -> list[list[int]]:
    """Outputs of texts and timestamps in any order, most of them legal, the first empty."""
    draw = random.Random(seed)
    found: list[list[int]] = [[]]
    for _ in range(count):
        tokens: list[int] = []
        time = FIRST + draw.randint(0, 3)
        for _ in range(draw.randint(1, 6)):
            tokens += [time] + [draw.randrange(EOS) for _ in range(draw.randint(0, 2))]
            time = min(VOCAB_SIZE - 1, time + draw.randint(0, 5))
        found.append(tokens[: draw.randint(1, len(tokens))])
    return found


@pytest.mark.parametrize("most", [None, 0, 5])
@pytest.mark.parametrize("seed", [1, 2])
def test_logits_equal_those_of_the_processors(seed: int, most: int | None) -> None:
    suppressed = [3, EOS]
    rows = outputs(seed, 40)
    rules = TranscriptionRules(tuple(suppressed), FIRST, EOS, most)
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB_SIZE) * 3
    kept = logits.clone()
    found = apply_transcription_rules(
        logits,
        ParamRows.of([SamplingParams(transcription=rules)] * len(rows)),
        np.array([len(PROMPT) + len(row) for row in rows], np.int32),
        np.full(len(rows), len(PROMPT), np.int32),
        [[*PROMPT, *row] for row in rows],
    )
    for row, output in enumerate(rows):
        expected = logits[row : row + 1]
        for process in processors(most, suppressed):
            expected = process(torch.tensor([[*PROMPT, *output]]), expected)
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=0)
    assert torch.equal(logits, kept)


def test_rows_without_rules_keep_their_logits() -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    plain = ParamRows.of([SamplingParams()] * 2)
    ends = np.array([3, 5], np.int32)
    assert apply_transcription_rules(logits, plain, ends, ends, [None, None]) is logits
    rules = TranscriptionRules((4, 5))
    mixed = ParamRows.of([SamplingParams(transcription=rules)] * 2)
    found = apply_transcription_rules(logits, mixed, ends, np.full(2, 3, np.int32), [None, None])
    assert found[0, 4] == found[0, 5] == -math.inf
    assert torch.equal(found[1], logits[1])
