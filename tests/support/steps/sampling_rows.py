"""Rows to sample for, made of their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from executor_service.sampling.sampler import SamplingRows
from executor_service.steps.sampling_params import ParamRows, SamplingParams, TokenMasks


def make_sampling_rows(
    params: Sequence[SamplingParams],
    *,
    seeds: npt.ArrayLike | None = None,
    positions: npt.ArrayLike = 9,
    num_prompt_tokens: int = 4,
    histories: Sequence[Sequence[int] | None] | None = None,
    masks: TokenMasks | None = None,
) -> SamplingRows:
    """One row for each of `params`. A single position is that of all rows; seeds count from 0."""
    count = len(params)
    return SamplingRows(
        params=ParamRows.of(params),
        seeds=np.arange(count, dtype=np.int64) if seeds is None else np.array(seeds, np.int64),
        positions=np.broadcast_to(positions, count).astype(np.int32),
        num_prompt_tokens=np.full(count, num_prompt_tokens, np.int32),
        histories=[None] * count if histories is None else histories,
        masks=masks,
    )
