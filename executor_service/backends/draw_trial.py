"""Tries what draws tokens against plain torch, on a whole vocabulary.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_service.errors import TrialFailed
from executor_service.sampling.philox import uniform
from executor_service.sampling.sampler import Draw, SamplingRows, draw_in_torch
from executor_service.steps.sampling_params import ParamRows, SamplingParams

# By so much of all weight may a running sum of V weights be off: they are float32, and where the
# number u falls between two tokens but for that, either may be drawn.
DRAW_TOLERANCE = 1e-5
_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, min_p=0.1),
)
_NUM_ROWS = 4 * len(_PARAMS)
# Rows without a token, greedy ones and others, and one with a single token.
_NAN, _INF, _ALL_HIDDEN, _SINGLE = (8, 9), (16, 17), (24, 25), (26,)


@torch.inference_mode()
def try_draw(draw: Draw, vocab_size: int, device: torch.device) -> float:
    """Draws tokens from random logits by `draw` and in plain torch.

    Returns by how much of all weight a token was missed at most. Raises TrialFailed if that is more
    than rounding, or greedy, cut or invalid rows differ at all.
    """
    logits, rows = _problem(vocab_size, device)
    expected, actual = draw_in_torch(logits, rows).cpu(), draw(logits, rows).cpu()
    is_open = _is_open(rows) & (expected >= 0).numpy()
    differs = (actual != expected).numpy()
    wrong = np.flatnonzero(differs & (~is_open | (actual < 0).numpy()))
    if len(wrong):
        row = int(wrong[0])
        raise TrialFailed(
            f"token {int(actual[row])} where plain torch says {int(expected[row])}"
            f" (row {row} of {_NUM_ROWS}, {rows.params[row]})"
        )
    missed = _missed_weight(logits, rows, actual.to(device), np.flatnonzero(is_open))
    if not missed <= DRAW_TOLERANCE:
        raise TrialFailed(
            f"tokens are off by {missed:.2g} of all weight, allowed {DRAW_TOLERANCE:g}"
        )
    return missed


def _problem(vocab_size: int, device: torch.device) -> tuple[Tensor, SamplingRows]:
    generator = torch.Generator().manual_seed(0)
    # Rows of logits may lie apart.
    logits = 3 * torch.randn(_NUM_ROWS, vocab_size + 3, generator=generator)[:, :vocab_size]
    logits[_NAN, vocab_size - 1] = torch.nan
    logits[_INF, 0] = torch.inf
    logits[_ALL_HIDDEN, :] = -torch.inf
    logits[_SINGLE, 1:] = -torch.inf
    indexes = np.arange(_NUM_ROWS)
    rows = SamplingRows(
        params=ParamRows.of(_PARAMS * (_NUM_ROWS // len(_PARAMS))),
        # All 64 bits matter.
        seeds=indexes.astype(np.int64) * 0x123456789ABCDEF - 2**61,
        positions=indexes.astype(np.int32) * 1013,
        num_prompt_tokens=np.ones(_NUM_ROWS, np.int32),
        histories=[None] * _NUM_ROWS,
    )
    return logits.to(device), rows


def _is_open(rows: SamplingRows) -> np.ndarray:
    """[S]; rows that may draw any token."""
    params = [rows.params[row] for row in range(len(rows.params))]
    return np.array([p.temperature > 0 and p.top_k is None and p.top_p == 1 for p in params])


def _missed_weight(
    logits: Tensor, rows: SamplingRows, token_ids: Tensor, chosen: np.ndarray
) -> float:
    """How far at most u lies from the weights of the token, of all weight, in float64.

    `token_ids`: [S]. `chosen`: the rows that count.
    """
    device = logits.device
    lines = torch.from_numpy(chosen).to(device)
    temperatures = torch.from_numpy(rows.params.temperatures[chosen]).to(device).double()
    tokens = token_ids[lines].long()[:, None]
    weights = torch.softmax(logits[lines].double() / temperatures[:, None], dim=-1)
    above = weights.cumsum(dim=-1).gather(1, tokens)
    below = above - weights.gather(1, tokens)
    u = uniform(
        torch.from_numpy(rows.seeds[chosen]).to(device),
        torch.from_numpy(rows.positions[chosen].astype(np.int64)).to(device),
    )[:, None]
    return float(torch.maximum(below - u, u - above).max().clamp(min=0))
