"""Sampling: from logits to tokens and scores."""

from executor_service.sampling.logit_adjustments import adjust_logits, unpack_words
from executor_service.sampling.sampler import (
    Adjust,
    Draw,
    LogitColumns,
    SamplingRows,
    StaticDraw,
    adjust_in_torch,
    draw_in_torch,
    draw_rows,
    draw_unseen_in_torch,
    philox_4x32_10,
    sample,
    uniform,
)
from executor_service.sampling.token_counts import IN_PROMPT, CountedRows, TokenCounts
from executor_service.sampling.transcription import apply_transcription_rules
from executor_service.sampling.truncation import ScoredTokens, make_columns, score, truncate

__all__ = [
    "IN_PROMPT",
    "Adjust",
    "CountedRows",
    "Draw",
    "LogitColumns",
    "SamplingRows",
    "ScoredTokens",
    "StaticDraw",
    "TokenCounts",
    "adjust_in_torch",
    "adjust_logits",
    "apply_transcription_rules",
    "draw_in_torch",
    "draw_rows",
    "draw_unseen_in_torch",
    "make_columns",
    "philox_4x32_10",
    "sample",
    "score",
    "truncate",
    "uniform",
    "unpack_words",
]
