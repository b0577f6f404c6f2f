"""Rules for the output of speech models: the first token, and timestamps in pairs.

Source: Radford 2022, "Robust speech recognition via large-scale weak supervision", section 4.5, in
the form of `WhisperTimeStampLogitsProcessor` of transformers.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from executor_service.steps import Int32Array, ParamRows, TranscriptionRules


def apply_transcription_rules(
    logits: Tensor,
    params: ParamRows,
    positions: Int32Array,
    num_prompt_tokens: Int32Array,
    histories: Sequence[Sequence[int] | None],
) -> Tensor:
    """Applies `SamplingParams.transcription` of `executor.proto`.

    `logits`: [S, V] float32. `positions`, `num_prompt_tokens`, `histories`: as for `adjust_logits`.
    Returns `logits` itself if no row has such rules, otherwise a changed copy.
    """
    rules = [params[row].transcription for row in range(len(params))]
    if not any(rules):
        return logits
    logits = logits.clone()
    for row, of_row in enumerate(rules):
        if of_row is None:
            continue
        start, end, history = int(num_prompt_tokens[row]), int(positions[row]), histories[row]
        if start == end and of_row.first_suppressed_token_ids:
            logits[row, list(of_row.first_suppressed_token_ids)] = -math.inf
        if of_row.first_timestamp_token_id is not None:
            assert history is not None, "a row with timestamps has a history"
            _apply_timestamps(
                logits[row], list(history[start:end]), of_row, of_row.first_timestamp_token_id
            )
    return logits


def _apply_timestamps(
    logits: Tensor, output: list[int], rules: TranscriptionRules, first_timestamp: int
) -> None:
    """Changes `logits` [V] of the token after `output`."""
    logits[first_timestamp - 1] = -math.inf
    is_after_timestamp = bool(output) and output[-1] >= first_timestamp
    is_after_pair = is_after_timestamp and (len(output) < 2 or output[-2] >= first_timestamp)
    if is_after_pair:
        logits[first_timestamp:] = -math.inf
    elif is_after_timestamp:
        logits[: rules.first_special_token_id] = -math.inf
    latest = next((token for token in reversed(output) if token >= first_timestamp), None)
    if latest is not None:
        # The end of a piece of text may be the start of the next; a new end comes later.
        least = latest if is_after_timestamp and not is_after_pair else latest + 1
        logits[first_timestamp:least] = -math.inf
    if not output:
        logits[:first_timestamp] = -math.inf
        if rules.max_first_timestamp is not None:
            logits[first_timestamp + rules.max_first_timestamp + 1 :] = -math.inf
    logprobs = logits.log_softmax(-1)
    is_timestamp = logprobs[first_timestamp:].logsumexp(-1) > logprobs[:first_timestamp].amax(-1)
    text = logits[:first_timestamp]
    text.copy_(torch.where(is_timestamp, -math.inf, text))
