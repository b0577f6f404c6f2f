"""The vectorised sampler against one that goes row by row; its random numbers and logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor_service.device import to_host
from executor_service.sampling import (
    Draw,
    SamplingRows,
    ScoredTokens,
    TokenCounts,
    draw_in_torch,
    draw_unseen_in_torch,
    make_columns,
    philox_4x32_10,
    sample,
    score,
    uniform,
)
from executor_service.steps import LogprobColumns, SamplingParams
from tests.support.devices.recorded_ops import WaitedForDevice, nobody_waits
from tests.support.models.philox import philox, random_number
from tests.support.steps.step_driver import make_sampling_rows

Floats = npt.NDArray[np.float32]
VOCAB_SIZE = 701
GREEDY = SamplingParams(temperature=0.0)


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
    _assert_equals_plain(_logits(64), make_sampling_rows([params] * 64))


def test_sample_equals_plain_when_rows_differ() -> None:
    params = [*TRUNCATIONS, GREEDY] * 4
    _assert_equals_plain(_logits(len(params), seed=5), make_sampling_rows(params))


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
    _assert_equals_plain(
        _logits(count), make_sampling_rows(mixed, positions=positions, histories=histories)
    )


def test_sample_takes_the_smallest_id_when_greedy_logits_tie() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, [600, 17, 300]] = 5.0
    assert sample(logits, make_sampling_rows([GREEDY, GREEDY])).tolist() == [0, 17]


def test_sample_keeps_all_ties_when_they_stand_at_top_k() -> None:
    logits = torch.full((500, VOCAB_SIZE), -20.0)
    logits[:, [10, 20, 30]] = 1.0
    rows = make_sampling_rows([SamplingParams(top_k=2)] * 500)
    assert set(sample(logits, rows).tolist()) == {10, 20, 30}


def test_sample_keeps_the_smallest_ids_when_ties_stand_at_top_p() -> None:
    logits = torch.zeros(500, VOCAB_SIZE)
    rows = make_sampling_rows([SamplingParams(top_p=2.5 / VOCAB_SIZE)] * 500)
    assert set(sample(logits, rows).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("u", "logits", "token"),
    [
        (0.0, {520: 0.0, 640: 0.0}, 520),
        (1 - 2.0**-53, {3: 0.1, 11: 0.7, 600: -0.4}, 600),
    ],
    ids=["smallest", "largest"],
)
def test_sample_takes_a_token_of_weight_when_u_is_extreme(
    monkeypatch: pytest.MonkeyPatch, u: float, logits: dict[int, float], token: int
) -> None:
    monkeypatch.setattr(
        "executor_service.sampling.sampler.uniform",
        lambda seeds, _: torch.full((len(seeds),), u, dtype=torch.float64),
    )
    row = torch.full((1, VOCAB_SIZE), -torch.inf)
    row[0, list(logits)] = torch.tensor(list(logits.values()))
    assert sample(row, make_sampling_rows([SamplingParams()])).tolist() == [token]


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
    sampled = sample(logits, make_sampling_rows([params] * count, positions=[77] * count))
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
    together = sample(logits, make_sampling_rows(params, positions=positions, seeds=seeds)).tolist()
    order = np.random.default_rng(0).permutation(32).tolist()
    moved = sample(
        logits,
        make_sampling_rows(
            params, positions=[positions[r] for r in order], seeds=[seeds[r] for r in order]
        ),
    ).tolist()
    assert moved == [together[r] for r in order]
    assert len(set(together)) > 8


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)])
@pytest.mark.parametrize("poison", ["nan", "inf", "all -inf"])
def test_sample_marks_only_the_row_when_its_logits_are_invalid(
    params: SamplingParams, poison: str
) -> None:
    logits = _logits(5)
    rows = make_sampling_rows([params] * 5)
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
    assert (sample(logits, make_sampling_rows([params])) >= 0).tolist() == [False]


def test_sample_marks_the_row_when_nothing_may_be_sampled() -> None:
    params = SamplingParams(min_tokens=99, suppressed_token_ids=tuple(range(VOCAB_SIZE)))
    sampled = sample(_logits(2), make_sampling_rows([params, GREEDY]))
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
    _assert_equals_plain(logits, make_sampling_rows(params))


SMALL_VOCAB_SIZE = 300
ALL_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.02),
    SamplingParams(top_p=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.1),
    SamplingParams(logit_bias={3: 1.5, 4: -math.inf}, num_logprobs=3),
    SamplingParams(min_tokens=9, suppressed_token_ids=(1, 2)),
    SamplingParams(allowed_token_ids=(5, 6, 7), bad_words_token_ids=((5,), (3, 6))),
)


def _rows() -> SamplingRows:
    return make_sampling_rows(
        ALL_PARAMS, positions=4, num_prompt_tokens=2, histories=[[1, 2, 3, 3]] * len(ALL_PARAMS)
    )


def _sample(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    return sample(logits, _rows(), draw)


def test_sample_waits_for_nothing_when_torch_draws_unseen() -> None:
    logits = torch.randn(
        len(ALL_PARAMS), SMALL_VOCAB_SIZE, generator=torch.Generator().manual_seed(3)
    )
    expected = _sample(logits, draw_in_torch).tolist()
    with nobody_waits():
        token_ids = _sample(logits, draw_unseen_in_torch)
        score(logits, token_ids, 3)
    assert token_ids.tolist() == expected


def test_sample_waits_for_nothing_when_kernels_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from triton.runtime.interpreter import GridExecutor

    from executor_service.backends.gpu_draw import triton_adjust, triton_draw

    launched = []
    # The interpreter itself would read tensors.
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launched.append(self.fn))
    logits = torch.zeros(len(ALL_PARAMS), SMALL_VOCAB_SIZE)
    with nobody_waits():
        _sample(logits, triton_draw)
    assert len(launched) == 6
    with nobody_waits():
        sample(logits, _rows(), triton_draw, triton_adjust)
    assert len(launched) == 6 + 7


def test_counts_wait_for_nothing_when_a_step_is_added() -> None:
    counts, token_ids = TokenCounts(SMALL_VOCAB_SIZE, torch.device("cpu")), torch.zeros(8).int()
    with nobody_waits():
        for _ in range(2):
            counted = _rows().with_counts(counts, np.arange(8, dtype=np.int32)).counted
            assert counted is not None
            counts.add(counted, token_ids)


def test_nobody_waits_raises_when_torch_looks_at_what_was_found() -> None:
    with pytest.raises(WaitedForDevice), nobody_waits():
        _sample(torch.randn(len(ALL_PARAMS), SMALL_VOCAB_SIZE), draw_in_torch)


# Known answers published with the Random123 library: (counter, key, result).
KNOWN_ANSWERS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words_when_given_a_known_counter(
    counter: str, key: str, expected: str
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in _words(counter))
    k0, k1 = (torch.tensor([word]) for word in _words(key))
    result = philox_4x32_10((c0, c1, c2, c3), (k0, k1))
    assert [word.item() for word in result] == _words(expected)
    assert philox(_words(counter), _words(key)) == _words(expected)


def test_uniform_follows_the_contract_when_seeds_use_all_bits() -> None:
    seeds = [0, 1, -1, -(2**63), 2**63 - 1, 0x1234_5678_9ABC_DEF0]
    positions = [0, 1, 77, 2**31 - 1, 5, 2**32 + 3]
    expected = list(map(random_number, seeds, positions))
    assert uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_uniform_is_flat_when_positions_run() -> None:
    u = uniform(torch.full((20_000,), 42), torch.arange(20_000)).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    counts, _ = np.histogram(u, bins=50, range=(0, 1))
    # 0.999 quantile of chi-square with 49 degrees of freedom.
    assert ((counts - 400) ** 2 / 400).sum() < 85.4


def _score(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> LogprobColumns:
    rows = np.arange(len(token_ids), dtype=np.int32)
    tokens = ScoredTokens(
        rows, rows + 5, np.array(token_ids, dtype=np.int32), np.array(num_top, dtype=np.int32)
    )
    scores = score(logits, torch.tensor(token_ids, dtype=torch.int32), max(num_top))
    return make_columns(tokens, to_host(*scores))


def test_score_tokens_gives_logprobs_and_ranks_when_tokens_differ() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, -torch.inf], [5.0, 5.0, 6.0]])
    columns = _score(logits, [2, 1, 0], [0, 0, 0])
    expected = torch.log_softmax(logits, dim=-1)[[0, 1, 2], [2, 1, 0]]
    assert columns.logprobs.tolist() == pytest.approx(expected.tolist())
    assert columns.ranks.tolist() == [2, 1, 2]
    assert columns.positions.tolist() == [5, 6, 7]
    assert columns.top_offsets.tolist() == [0, 0, 0, 0]


def test_score_tokens_gives_alternatives_when_more_are_asked_than_there_are() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [9.0, 8.0, 7.0]])
    columns = _score(logits, [0, 0], [1, 10])
    assert columns.top_offsets.tolist() == [0, 1, 4]
    assert columns.top_token_ids.tolist() == [1, 0, 1, 2]
    assert columns.top_logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


def test_score_tokens_sorts_alternatives_when_they_are_the_whole_vocabulary() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    columns = _score(logits, [7, 8], [300, 64])
    expected = torch.log_softmax(logits, dim=-1).sort(dim=-1, descending=True)
    top_ids = [*expected.indices[0].tolist(), *expected.indices[1, :64].tolist()]
    top_logprobs = [*expected.values[0].tolist(), *expected.values[1, :64].tolist()]
    assert columns.top_token_ids.tolist() == top_ids
    assert columns.top_logprobs.tolist() == pytest.approx(top_logprobs)


def test_score_tokens_goes_in_parts_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 20, generator=torch.Generator().manual_seed(0))
    token_ids, num_top = list(range(11)), [row % 3 for row in range(11)]
    whole = _score(logits, token_ids, num_top)
    monkeypatch.setattr("executor_service.sampling.truncation._TOKENS_AT_A_TIME", 4)
    parts = _score(logits, token_ids, num_top)
    assert parts.logprobs.tolist() == whole.logprobs.tolist()
    assert parts.top_token_ids.tolist() == whole.top_token_ids.tolist()
    assert parts.top_offsets.tolist() == whole.top_offsets.tolist()
