"""The vectorised sampler against a plain one that goes row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor_service.sampling.sampler import SamplingRows, sample, uniform
from executor_service.steps.sampling_params import ParamRows, SamplingParams

Floats = npt.NDArray[np.float32]
VOCAB_SIZE = 701
GREEDY = SamplingParams(temperature=0.0)


def _rows(
    params: Sequence[SamplingParams],
    positions: Sequence[int] | None = None,
    num_prompt_tokens: Sequence[int] | None = None,
    histories: Sequence[Sequence[int] | None] | None = None,
    seeds: Sequence[int] | None = None,
) -> SamplingRows:
    count = len(params)
    return SamplingRows(
        params=ParamRows.of(params),
        seeds=np.array(range(count) if seeds is None else seeds, dtype=np.int64),
        positions=np.array([9] * count if positions is None else positions, dtype=np.int32),
        num_prompt_tokens=np.array(
            [4] * count if num_prompt_tokens is None else num_prompt_tokens, dtype=np.int32
        ),
        histories=[None] * count if histories is None else histories,
    )


def _plain_sample(logits: Floats, rows: SamplingRows, row: int) -> int:
    """One row, step by step as `executor.proto` puts it."""
    params, position = rows.params[row], int(rows.positions[row])
    prompt_len = int(rows.num_prompt_tokens[row])
    x = logits.astype(np.float32).copy()
    history = list(rows.histories[row] or [])[:position]
    x[_plain_forbidden(params, history, prompt_len, len(x))] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    for token in set(history):
        penalty = np.float32(params.repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(history[prompt_len:]):
        count = history[prompt_len:].count(token)
        x[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        x[token] -= np.float32(params.presence_penalty)
    if params.temperature == 0:
        return int(np.argmax(x))
    x = (x - x.max()) / np.float32(params.temperature)
    keep = _plain_truncation(x, params)
    weights = np.where(keep, np.exp(x), 0).astype(np.float64)
    seed = torch.tensor([int(rows.seeds[row])])
    u = uniform(seed, torch.tensor([position])).item()
    total, running = math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if running > u * total:
            return token
    raise AssertionError


def _plain_forbidden(
    params: SamplingParams, history: Sequence[int], prompt_len: int, vocab_size: int
) -> list[int]:
    forbidden: list[int] = []
    if len(history) - prompt_len < params.min_tokens:
        forbidden += params.suppressed_token_ids
    if params.allowed_token_ids:
        forbidden += [t for t in range(vocab_size) if t not in params.allowed_token_ids]
    for *before, last in params.bad_words_token_ids:
        if len(before) <= len(history) and history[len(history) - len(before) :] == before:
            forbidden.append(last)
    return forbidden


def _plain_truncation(x: Floats, params: SamplingParams) -> npt.NDArray[np.bool_]:
    keep = np.ones(len(x), dtype=bool)
    if params.top_k is not None:
        keep &= x >= np.sort(x)[::-1][min(params.top_k, len(x)) - 1]
    if params.top_p < 1:
        order = sorted(np.flatnonzero(keep), key=lambda token: (-x[token], token))
        total = math.fsum(np.exp(x[order]))
        running, kept = 0.0, 0
        while kept == 0 or running < params.top_p * total:
            running += float(np.exp(x[order[kept]]))
            kept += 1
        keep[:] = False
        keep[order[:kept]] = True
    return keep & (np.exp(x) >= np.float32(params.min_p))


def _logits(num_rows: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * spread


def _assert_equals_plain(logits: torch.Tensor, rows: SamplingRows) -> None:
    before = logits.clone()
    sampled = sample(logits, rows)
    expected = [_plain_sample(logits[r].numpy(), rows, r) for r in range(len(rows.params))]
    assert sampled.tolist() == expected
    assert torch.equal(logits, before)


TRUNCATIONS = (
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=300, temperature=3.0),
    SamplingParams(top_k=VOCAB_SIZE + 5),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999, temperature=4.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=1e-4, temperature=4.0, top_p=0.99),
    SamplingParams(top_k=40, top_p=0.8, min_p=0.02, temperature=1.3),
    SamplingParams(top_k=400, top_p=0.95, temperature=2.5),
    SamplingParams(min_p=0.3, top_p=0.6),
    SamplingParams(min_p=0.2, top_p=0.8, top_k=300, temperature=3.0),
)


@pytest.mark.parametrize("params", TRUNCATIONS)
def test_sample_equals_plain_when_all_rows_share_params(params: SamplingParams) -> None:
    _assert_equals_plain(_logits(64), _rows([params] * 64))


def test_sample_equals_plain_when_rows_differ() -> None:
    params = [*TRUNCATIONS, GREEDY] * 4
    _assert_equals_plain(_logits(len(params), seed=5), _rows(params))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={3: 12.0, 9: -100.0, VOCAB_SIZE - 1: 11.5}),
        SamplingParams(min_tokens=6, suppressed_token_ids=(1, 5, 44)),
        SamplingParams(logit_bias=dict.fromkeys(range(0, 700, 2), -math.inf)),
        SamplingParams(allowed_token_ids=(690, 3, 3, 0)),
        SamplingParams(bad_words_token_ids=((3,), (690,), *((t,) for t in range(0, 600, 3)))),
        SamplingParams(
            allowed_token_ids=tuple(range(60)),
            # Of every second token one of the four has to come next.
            bad_words_token_ids=tuple(
                (t, u) for t in range(0, 60, 2) for u in range(60) if (t + u) % 4
            ),
            logit_bias={5: -math.inf, 4: 3.0},
            frequency_penalty=0.5,
        ),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(presence_penalty=3.0),
        SamplingParams(frequency_penalty=-2.0),
        SamplingParams(
            repetition_penalty=1.3,
            presence_penalty=-0.5,
            frequency_penalty=1.1,
            logit_bias={7: 9.0},
            min_tokens=2,
            suppressed_token_ids=(7,),
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sample_equals_plain_when_logits_are_adjusted(
    params: SamplingParams, temperature: float
) -> None:
    params = replace(params, temperature=temperature)
    count = 24
    rng = np.random.default_rng(1)
    histories = [rng.integers(0, 60, 14).tolist() for _ in range(count)]
    # Histories may be longer than the position: what comes after it does not count.
    positions = [4 + row % 10 for row in range(count)]
    mixed = [params if row % 3 else GREEDY for row in range(count)]
    _assert_equals_plain(_logits(count), _rows(mixed, positions, histories=histories))


def test_sample_takes_the_smallest_id_when_greedy_logits_tie() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, [600, 17, 300]] = 5.0
    assert sample(logits, _rows([GREEDY, GREEDY])).tolist() == [0, 17]


def test_sample_keeps_all_ties_when_they_stand_at_top_k() -> None:
    logits = torch.full((500, VOCAB_SIZE), -20.0)
    logits[:, [10, 20, 30]] = 1.0
    rows = _rows([SamplingParams(top_k=2)] * 500)
    assert set(sample(logits, rows).tolist()) == {10, 20, 30}


def test_sample_keeps_the_smallest_ids_when_ties_stand_at_top_p() -> None:
    logits = torch.zeros(500, VOCAB_SIZE)
    rows = _rows([SamplingParams(top_p=2.5 / VOCAB_SIZE)] * 500)
    assert set(sample(logits, rows).tolist()) == {0, 1, 2}


def test_sample_takes_first_token_of_weight_when_u_is_smallest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "executor_service.sampling.sampler.uniform",
        lambda seeds, _: torch.zeros(len(seeds)).double(),
    )
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, [520, 640]] = 0.0
    assert sample(logits, _rows([SamplingParams()])).tolist() == [520]


def test_sample_takes_last_token_of_weight_when_u_is_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = 1 - 2.0**-53
    monkeypatch.setattr(
        "executor_service.sampling.sampler.uniform",
        lambda seeds, _: torch.full((len(seeds),), largest, dtype=torch.float64),
    )
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, [3, 11, 600]] = torch.tensor([0.1, 0.7, -0.4])
    assert sample(logits, _rows([SamplingParams()])).tolist() == [600]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(temperature=2.0), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(top_k=3), [1, 3, 4]),
        # Falling: token 4 (0.4), 1 (0.25), 3 (0.15), 0 (0.1), 2 (0.06), 5 (0.04).
        (SamplingParams(top_p=0.7), [1, 3, 4]),
        (SamplingParams(min_p=0.2), [0, 1, 3, 4]),
        (SamplingParams(top_k=4, top_p=0.7), [1, 4]),
    ],
)
def test_sample_has_the_right_distribution_when_seeds_vary(
    params: SamplingParams, kept: list[int]
) -> None:
    probabilities = np.array([0.1, 0.25, 0.06, 0.15, 0.4, 0.04])
    count = 6000
    logits = torch.from_numpy(np.log(probabilities)).float().expand(count, 6).contiguous()
    sampled = sample(logits, _rows([params] * count, positions=[77] * count))
    weights = np.where(np.isin(np.arange(6), kept), probabilities ** (1 / params.temperature), 0)
    expected = weights / weights.sum() * count
    counts = np.bincount(sampled.numpy(), minlength=6)
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    # 0.999 quantile of chi-square with 5 degrees of freedom, the most there are.
    assert chi_square < 20.5


def test_sample_depends_on_seed_and_position_only_when_rows_move() -> None:
    logits = _logits(1).expand(32, -1).contiguous()
    params = [SamplingParams(temperature=1.5)] * 32
    seeds, positions = list(range(32)), [5 + row % 7 for row in range(32)]
    together = sample(logits, _rows(params, positions, seeds=seeds)).tolist()
    order = np.random.default_rng(0).permutation(32).tolist()
    moved = sample(
        logits,
        _rows(params, [positions[r] for r in order], seeds=[seeds[r] for r in order]),
    ).tolist()
    assert moved == [together[r] for r in order]
    assert len(set(together)) > 8


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)])
@pytest.mark.parametrize("poison", ["nan", "inf", "all -inf"])
def test_sample_marks_only_the_row_when_its_logits_are_invalid(
    params: SamplingParams, poison: str
) -> None:
    logits = _logits(5)
    rows = _rows([params] * 5)
    expected = sample(logits, rows).tolist()
    if poison == "all -inf":
        logits[2] = -torch.inf
    else:
        logits[2, 13] = float(poison)
    sampled = sample(logits, rows)
    assert (sampled >= 0).tolist() == [True, True, False, True, True]
    expected[2] = -1
    assert sampled.tolist() == expected


def test_sample_marks_the_row_when_suppression_hides_an_infinity() -> None:
    logits = _logits(1)
    logits[0, 3] = torch.inf
    params = SamplingParams(temperature=0.0, min_tokens=99, suppressed_token_ids=(3,))
    assert (sample(logits, _rows([params])) >= 0).tolist() == [False]


def test_sample_marks_the_row_when_nothing_may_be_sampled() -> None:
    params = SamplingParams(min_tokens=99, suppressed_token_ids=tuple(range(VOCAB_SIZE)))
    sampled = sample(_logits(2), _rows([params, GREEDY]))
    assert (sampled >= 0).tolist() == [False, True]


def test_sample_equals_plain_when_the_vocabulary_is_large() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(12, 9001, generator=generator)
    params = [
        SamplingParams(top_p=0.3, temperature=0.5),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=5000, top_p=0.99, temperature=3.0),
        SamplingParams(top_k=300),
        SamplingParams(min_p=0.001),
        SamplingParams(temperature=2.0),
    ] * 2
    _assert_equals_plain(logits, _rows(params))
