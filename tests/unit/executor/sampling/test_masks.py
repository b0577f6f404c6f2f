from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.sampling.logit_adjustments import adjust_logits, unpack_words
from executor_service.sampling.sampler import SamplingRows, draw_in_torch, sample
from executor_service.steps.sampling_params import Grammar, ParamRows, SamplingParams, TokenMasks

NUM_TOKENS = 77
NUM_WORDS = 3
DEVICES = [torch.device(name) for name in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]
GRAMMAR = Grammar("regex", ("a",))


def packed(allowed: np.ndarray) -> np.ndarray:
    """[G, V] bool to [G, W] int32, bit by bit. Beyond V, all bits are set: they mean nothing."""
    words = np.zeros((len(allowed), NUM_WORDS), np.uint32)
    for line, tokens in enumerate(allowed):
        for token in range(32 * NUM_WORDS):
            if token >= len(tokens) or tokens[token]:
                words[line, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def some_allowed(num_rows: int) -> np.ndarray:
    return np.random.default_rng(num_rows).random((num_rows, NUM_TOKENS)) < 0.2


def sampling_rows(num_rows: int, masks: TokenMasks | None, temperature: float) -> SamplingRows:
    params = [SamplingParams(temperature=temperature, grammar=GRAMMAR)] * num_rows
    return SamplingRows(
        ParamRows.of(params),
        np.arange(num_rows, dtype=np.int64),
        np.full(num_rows, 9, np.int32),
        np.full(num_rows, 4, np.int32),
        [[1] * 9] * num_rows,
        masks,
    )


@pytest.mark.parametrize("rows", [[0], [1, 2, 3], [0, 4, 5], list(range(70))])
def test_logits_are_minus_infinity_when_a_mask_does_not_allow_them(rows: list[int]) -> None:
    logits = torch.randn(70, NUM_TOKENS)
    allowed = some_allowed(len(rows))
    masks = TokenMasks(np.array(rows), packed(allowed), (), {})
    given = sampling_rows(70, masks, 0.0)
    before = logits.clone()
    adjusted = adjust_logits(
        logits, given.params, given.positions, given.num_prompt_tokens, given.histories, masks
    )
    expected = logits.clone()
    for row, tokens in zip(rows, allowed, strict=True):
        expected[row, torch.from_numpy(~tokens)] = -torch.inf
    assert torch.equal(adjusted, expected)
    assert torch.equal(logits, before)


def test_logits_are_passed_on_when_no_row_has_a_mask_yet() -> None:
    logits = torch.randn(2, NUM_TOKENS)
    masks = TokenMasks(np.empty(0, np.int64), np.empty((0, NUM_WORDS), np.int32), (0, 1), {})
    given = sampling_rows(2, masks, 0.0)
    adjusted = adjust_logits(
        logits, given.params, given.positions, given.num_prompt_tokens, given.histories, masks
    )
    assert adjusted is logits


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_token_is_an_allowed_one_when_any_draw_chooses(
    temperature: float, device: torch.device
) -> None:
    allowed = some_allowed(50)
    masks = TokenMasks(np.arange(50), packed(allowed), (), {})
    seen: list[Tensor] = []

    def draw(adjusted: Tensor, rows: SamplingRows) -> Tensor:
        seen.append(adjusted)
        return draw_in_torch(adjusted, rows)

    logits = torch.randn(50, NUM_TOKENS, device=device)
    tokens = sample(logits, sampling_rows(50, masks, temperature), draw)
    assert all(allowed[row, token] for row, token in enumerate(tokens.tolist()))
    assert torch.equal(torch.isfinite(torch.cat(seen)).cpu(), torch.from_numpy(allowed))


def test_row_has_no_token_when_its_mask_allows_none() -> None:
    masks = TokenMasks(np.array([1]), np.zeros((1, NUM_WORDS), np.int32), (), {})
    tokens = sample(torch.randn(2, NUM_TOKENS), sampling_rows(2, masks, 1.0)).tolist()
    assert tokens[0] >= 0
    assert tokens[1] == -1


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_words_are_unpacked_when_a_device_does_it(device: torch.device) -> None:
    allowed = some_allowed(40)
    unpacked = unpack_words(torch.from_numpy(packed(allowed)).to(device), NUM_TOKENS)
    assert torch.equal(unpacked.cpu(), torch.from_numpy(~allowed))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_row_has_no_token_when_a_mask_hides_what_is_wrong_with_its_logits(bad: float) -> None:
    allowed = np.ones((1, NUM_TOKENS), np.bool_)
    allowed[0, 3] = False
    logits = torch.randn(2, NUM_TOKENS)
    logits[1, 3] = bad
    masks = TokenMasks(np.array([1]), packed(allowed), (), {})
    tokens = sample(logits, sampling_rows(2, masks, 0.0)).tolist()
    assert (tokens[0] >= 0, tokens[1]) == (True, -1)


def test_tokens_are_those_of_each_row_alone_when_some_of_many_have_a_mask() -> None:
    masked = np.array([0, 5, 31, 32, 69, 70, 99])
    allowed = some_allowed(len(masked))
    masks = TokenMasks(masked, packed(allowed), (), {})
    logits = torch.randn(100, NUM_TOKENS)
    rows = sampling_rows(100, masks, 0.7)
    tokens = sample(logits, rows)
    for row in range(100):
        alone = rows.part(slice(row, row + 1))
        assert sample(logits[row : row + 1], alone) == tokens[row]
    plain = sample(logits, sampling_rows(100, None, 0.7))
    is_masked = np.isin(np.arange(100), masked)
    assert torch.equal(tokens[~is_masked], plain[~is_masked])
    of_masked = tokens[masked].tolist()
    assert all(allowed[index, token] for index, token in enumerate(of_masked))
