"""Trials of kernels that draw tokens, adjust logits or copy blocks.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from executor_service.device import CopyBlocks, Uploads, copy_in_torch, streams_of
from executor_service.errors import TrialFailed
from executor_service.sampling import (
    Adjust,
    Draw,
    SamplingRows,
    TokenCounts,
    adjust_in_torch,
    draw_in_torch,
    truncate,
    uniform,
)
from executor_service.steps import Grammar, ParamRows, SamplingParams, TokenMasks
from executor_service.trials.trial import Trial
from splitserve_contract import EXAMPLES_OF_LIMITS

# Allowed error of a running sum of V float32 weights, as a share of all weight: if the random
# number u is that close to the border of two tokens, either may be drawn.
DRAW_TOLERANCE = 1e-5
_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.8),
    # So flat that nearly all tokens are near the cut.
    SamplingParams(temperature=300.0, top_p=0.99),
    SamplingParams(temperature=0.0, **EXAMPLES_OF_LIMITS),
    SamplingParams(temperature=0.8, **EXAMPLES_OF_LIMITS),
    *(SamplingParams(temperature=2.0, **{name: x}) for name, x in EXAMPLES_OF_LIMITS.items()),
)
_ROUND = len(_PARAMS)
_NUM_ROWS = 3 * _ROUND
# Rows with NaN, with +inf and with only -inf (greedy and random), and one with a single token.
_NAN, _INF, _ALL_HIDDEN, _SINGLE = (_ROUND, 8), (2 * _ROUND, 6), (7, _ROUND + 3), (2 * _ROUND + 4,)


@torch.inference_mode()
def try_draw(draw: Draw, vocab_size: int, device: torch.device) -> float:
    """Draws tokens from random logits by `draw` and in plain torch, and compares them.

    Returns the largest distance of a random number from its token, as a share of all weight. Raises
    TrialFailed if that is more than rounding, or if greedy or invalid rows differ at all.
    """
    logits, rows = _problem(vocab_size, device)
    # A batch without random rows may be drawn by other kernels.
    greedy = np.flatnonzero(rows.params.temperatures <= 0)
    return Trial(
        reference=lambda case: draw_in_torch(*case).cpu().numpy(),
        candidate=lambda case: draw(*case).cpu().numpy(),
        cases=((logits[torch.from_numpy(greedy).to(device)], _take(rows, greedy)), (logits, rows)),
        error_of=_misdrawn,
        allowed=DRAW_TOLERANCE,
        complaint=lambda missed: (
            f"tokens are off by {missed:.2g} of the total weight, allowed {DRAW_TOLERANCE:g}"
        ),
    ).run()


def _misdrawn(case: tuple[Tensor, SamplingRows], expected: np.ndarray, actual: np.ndarray) -> float:
    """Returns the largest distance of a random number from its token, as a share of all weight.

    `expected`, `actual`: token ids, [S]. Raises TrialFailed if other rows are invalid than in plain
    torch, or if greedy rows differ.
    """
    logits, rows = case
    is_random = rows.params.temperatures > 0
    wrong = np.flatnonzero((actual != expected) & (~is_random | (actual < 0) | (expected < 0)))
    if len(wrong):
        row = int(wrong[0])
        raise TrialFailed(
            f"token {int(actual[row])}, plain torch has {int(expected[row])}"
            f" (row {row} of {len(logits)}, {rows.params[row]})"
        )
    chosen = np.flatnonzero(is_random & (actual >= 0))
    if not len(chosen):
        return 0.0
    return _missed_weight(logits, rows, torch.from_numpy(actual).to(logits.device), chosen)


def _problem(vocab_size: int, device: torch.device) -> tuple[Tensor, SamplingRows]:
    generator = torch.Generator().manual_seed(0)
    # Rows have the memory layout of serving: kernels are compiled for layouts.
    logits = 3 * torch.randn(_NUM_ROWS, vocab_size, generator=generator)
    logits[_NAN, vocab_size - 1] = torch.nan
    logits[_INF, 0] = torch.inf
    logits[_ALL_HIDDEN, :] = -torch.inf
    logits[_SINGLE, 1:] = -torch.inf
    indexes = np.arange(_NUM_ROWS)
    rows = SamplingRows(
        params=ParamRows.of(_PARAMS * (_NUM_ROWS // len(_PARAMS))),
        # Seeds use all 64 bits.
        seeds=indexes.astype(np.int64) * 0x123456789ABCDEF - 2**61,
        positions=indexes.astype(np.int32) * 1013,
        num_prompt_tokens=np.ones(_NUM_ROWS, np.int32),
        histories=[None] * _NUM_ROWS,
    )
    return logits.to(device), rows


def _take(rows: SamplingRows, chosen: np.ndarray) -> SamplingRows:
    return SamplingRows(
        rows.params.take(chosen),
        rows.seeds[chosen],
        rows.positions[chosen],
        rows.num_prompt_tokens[chosen],
        [None] * len(chosen),
    )


def _missed_weight(
    logits: Tensor, rows: SamplingRows, token_ids: Tensor, chosen: np.ndarray
) -> float:
    """Returns the largest distance of u from its token's interval of the kept weight, in float64.

    `token_ids`: [S]. `chosen`: indexes of the rows that count.
    """
    device = logits.device
    lines = torch.from_numpy(chosen).to(device)
    params = rows.params.take(chosen)
    temperatures = torch.from_numpy(params.temperatures).to(device)[:, None]
    tokens = token_ids[lines].long()[:, None]
    distances = logits[lines] - logits[lines].amax(dim=-1, keepdim=True)
    is_kept = truncate(distances / temperatures, params) > 0
    weights = torch.exp(distances.double() / temperatures.double()) * is_kept
    weights /= weights.sum(dim=-1, keepdim=True)
    above = weights.cumsum(dim=-1).gather(1, tokens)
    below = above - weights.gather(1, tokens)
    u = uniform(
        torch.from_numpy(rows.seeds[chosen]).to(device),
        torch.from_numpy(rows.positions[chosen].astype(np.int64)).to(device),
    )[:, None]
    return float(torch.maximum(below - u, u - above).max().clamp(min=0))


# -- Trial of code that changes logits before tokens are drawn -------------------------------------

# Results should have the same bits; a device whose division rounds differently is accepted.
_TOLERANCE = 1e-6
_NUM_TOKENS = 40
_NUM_PROMPT_TOKENS = 30


@torch.inference_mode()
def try_adjust(adjust: Adjust, vocab_size: int, device: torch.device) -> None:
    """Adjusts random logits by `adjust` and in plain torch. Raises TrialFailed if they differ."""
    generator = torch.Generator().manual_seed(0)
    params = _params(vocab_size)
    logits = (3 * torch.randn(len(params), vocab_size, generator=generator)).to(device)
    before = logits.clone()
    uploads = Uploads(device, streams_of(device))
    rows = _rows(params, vocab_size, device, uploads)

    def differing_rows(_case: SamplingRows, expected: Tensor, actual: Tensor) -> float:
        is_same = torch.isclose(actual, expected, rtol=_TOLERANCE, atol=0.0)
        wrong = (~is_same).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            where = f"row {wrong[0]} of {len(params)}, {params[wrong[0]]}"
            raise TrialFailed(f"logits differ ({where})")
        if not torch.equal(logits, before):
            raise TrialFailed("the input logits were overwritten")
        return 0.0

    Trial(
        reference=lambda case: adjust_in_torch(logits, case, uploads),
        candidate=lambda case: adjust(logits, case, uploads),
        cases=(rows,),
        error_of=differing_rows,
    ).run()


def _params(vocab_size: int) -> list[SamplingParams]:
    last = vocab_size - 1
    bias = {token: 0.1 * token - 3 for token in range(0, vocab_size, max(1, vocab_size // 300))}
    grammar = Grammar("regex", ("a",))
    return [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.7, frequency_penalty=0.3, presence_penalty=-0.9),
        SamplingParams(logit_bias=bias),
        SamplingParams(logit_bias={last: 5.0}, frequency_penalty=-1.7, repetition_penalty=1.1),
        SamplingParams(
            logit_bias={0: -math.inf, last: 1.0}, min_tokens=99, suppressed_token_ids=(last,)
        ),
        SamplingParams(allowed_token_ids=(0, last), presence_penalty=0.2),
        SamplingParams(grammar=grammar),
        SamplingParams(grammar=grammar, allowed_token_ids=tuple(range(0, vocab_size, 2))),
    ]


def _rows(
    params: list[SamplingParams], vocab_size: int, device: torch.device, uploads: Uploads
) -> SamplingRows:
    count = len(params)
    random = np.random.default_rng(0)
    with_grammar = np.array([row for row in range(count) if params[row].grammar is not None])
    words = random.integers(
        -(2**31), 2**31, (len(with_grammar), -(-vocab_size // 32)), dtype=np.int64
    )
    rows = SamplingRows(
        params=ParamRows.of(params),
        seeds=np.zeros(count, np.int64),
        positions=np.full(count, _NUM_TOKENS, np.int32),
        num_prompt_tokens=np.full(count, _NUM_PROMPT_TOKENS, np.int32),
        histories=random.integers(vocab_size, size=(count, _NUM_TOKENS)).tolist(),
        masks=TokenMasks(with_grammar, words.astype(np.int32), (), {}),
    )
    return rows.with_counts(
        TokenCounts(vocab_size, device, uploads), np.arange(count, dtype=np.int32)
    )


# -- Trial of code that copies blocks --------------------------------------------------------------

_NUM_BLOCKS = 40
# Not a multiple of the words that a kernel program copies.
_NUM_WORDS = 9001


@torch.inference_mode()
def try_copy(copy: CopyBlocks, device: torch.device) -> None:
    """Copies random blocks by `copy` and in plain torch. Raises TrialFailed if bits differ."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2**62, (_NUM_BLOCKS, _NUM_WORDS), generator=generator).to(device)
    order = torch.randperm(_NUM_BLOCKS, generator=generator).to(device)
    sources, destinations = order[:10].repeat(2), order[10:30]

    def copied(copy_blocks: CopyBlocks) -> Tensor:
        pool = bits.clone()
        copy_blocks(pool, sources, destinations)
        return pool

    Trial(
        reference=lambda _case: copied(copy_in_torch),
        candidate=lambda _case: copied(copy),
        cases=(None,),
        error_of=lambda _case, expected, actual: float((actual != expected).any(dim=1).sum()),
        complaint=lambda wrong: f"{wrong:.0f} of {_NUM_BLOCKS} blocks have wrong contents",
    ).run()
