"""How many guesses pay: as many as bring the most tokens in a time, by what is known of both.

A guess of a row counts only if all before it were right, so it is worth the chance of that. The
best ones of all rows are taken first, for as long as expected tokens grow faster than the time that
the step takes.

Shape letters: K rows that have guesses, D guesses of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.core.request import Int32Array
from scheduler_service.core.speculation.pass_times import Float64Array, PassTimes

# What is expected is no more than that: less of a gain is none.
_LEAST_GAIN = 1.02
# Whoever is mostly wrong is not made to wait for the sake of others.
_LEAST_CHANCE = 0.2


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """`counts`: [K] int32, guesses of each row. `runs_on`: whether rows run on behind them."""

    counts: Int32Array
    runs_on: bool


def choose_lengths(
    chances: Float64Array, most: Int32Array, num_rows: int, num_run_on: int, times: PassTimes
) -> DraftLengths | None:
    """For rows [K] of a step of `num_rows`, `most` [K] guesses of each; None if none pays.

    `chances`: [K, D], how probably the first guesses of a row are all right, by their number.
    Compared with steps without, in which rows run on for `num_run_on` tokens. Guesses need tokens
    that are known. So between a step that has some and the next, either the others go on, or, where
    all rows have some, nobody does until the result is there.
    """
    num_each = chances.shape[1]
    is_none = (np.arange(num_each) >= most[:, None]) | (chances[:, :1] < _LEAST_CHANCE)
    flat = np.where(is_none, 0.0, chances).ravel()
    ranked = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
    passes_us = times.passes_us(num_rows + np.arange(len(ranked) + 1))
    if passes_us is None or not len(ranked):
        return None
    pass_us, beside_us = passes_us[0], times.overhead_us(is_drafted=False)
    runs_us, num_run_tokens = num_run_on * pass_us, num_rows * num_run_on
    plain_rate = (num_rows + num_run_tokens) / (pass_us + runs_us + beside_us)
    # Of steps with the first of these guesses, the first two of them, and so on.
    passes_us, tokens = passes_us[1:], num_rows + np.cumsum(flat[ranked])
    num_others = num_rows - np.cumsum(ranked % num_each == 0)
    alone_us = passes_us + times.overhead_us(is_drafted=True)
    rates = np.where(
        num_others > 0,
        (tokens + num_others) / (passes_us + pass_us + 2 * beside_us),
        tokens / alone_us,
    )
    with_runs = np.where(num_others > 0, 0.0, (tokens + num_run_tokens) / (alone_us + runs_us))
    runs_on = bool(with_runs.max() > rates.max())
    rates = with_runs if runs_on else rates
    if rates.max() < _LEAST_GAIN * plain_rate:
        return None
    chosen = ranked[: int(rates.argmax()) + 1]
    counts = np.bincount(chosen // num_each, minlength=len(most))
    return DraftLengths(counts.astype(np.int32), runs_on)
