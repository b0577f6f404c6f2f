"""Masks of grammars, and counts of tokens that are kept from step to step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor_service.device import HostStreams, Uploads
from executor_service.sampling import (
    IN_PROMPT,
    CountedRows,
    SamplingRows,
    TokenCounts,
    adjust_logits,
    draw_in_torch,
    sample,
    token_counts,
    unpack_words,
)
from executor_service.steps import Grammar, SamplingParams, TokenMasks
from tests.support.steps.step_driver import make_sampling_rows

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
    return make_sampling_rows(params, histories=[[1] * 9] * num_rows, masks=masks)


def adjusted(logits: Tensor, masks: TokenMasks) -> Tensor:
    rows = sampling_rows(len(logits), masks, 0.0)
    return adjust_logits(
        logits, rows.params, rows.positions, rows.num_prompt_tokens, rows.histories, masks
    )


@pytest.mark.parametrize("rows", [[0], [1, 2, 3], [0, 4, 5], list(range(70))])
def test_logits_are_minus_infinity_when_a_mask_does_not_allow_them(rows: list[int]) -> None:
    logits, allowed = torch.randn(70, NUM_TOKENS), some_allowed(len(rows))
    expected, before = logits.clone(), logits.clone()
    for row, tokens in zip(rows, allowed, strict=True):
        expected[row, torch.from_numpy(~tokens)] = -torch.inf
    masks = TokenMasks(np.array(rows), packed(allowed), (), {})
    assert torch.equal(adjusted(logits, masks), expected)
    assert torch.equal(logits, before)


def test_logits_are_passed_on_when_no_row_has_a_mask_yet() -> None:
    logits = torch.randn(2, NUM_TOKENS)
    masks = TokenMasks(np.empty(0, np.int64), np.empty((0, NUM_WORDS), np.int32), (0, 1), {})
    assert adjusted(logits, masks) is logits


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
def test_row_has_no_token_when_a_mask_hides_invalid_logits(bad: float) -> None:
    allowed = np.ones((1, NUM_TOKENS), np.bool_)
    allowed[0, 3] = False
    logits = torch.randn(2, NUM_TOKENS)
    logits[1, 3] = bad
    masks = TokenMasks(np.array([1]), packed(allowed), (), {})
    tokens = sample(logits, sampling_rows(2, masks, 0.0)).tolist()
    assert (tokens[0] >= 0, tokens[1]) == (True, -1)


def test_tokens_are_those_of_each_row_alone_under_masks() -> None:
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


VOCAB_SIZE = 11
CPU = torch.device("cpu")


def _of_rows(
    counts: TokenCounts,
    histories: dict[int, list[int]],
    positions: Sequence[int] | None = None,
    num_prompt_tokens: int = 2,
) -> CountedRows:
    """By row ids; all rows that sample have penalties."""
    lengths = [len(history) for history in histories.values()]
    return counts.of_rows(
        np.arange(len(histories)),
        np.array(list(histories), np.int32),
        list(histories.values()),
        np.array(lengths if positions is None else positions, np.int32),
        np.full(len(histories), num_prompt_tokens, np.int32),
    )


def _counted(counted: CountedRows) -> list[list[int]]:
    counts: list[list[int]] = counted.table[counted.lines].tolist()
    return counts


def _expected(tokens: Sequence[int], num_prompt_tokens: int = 2) -> list[int]:
    prompt, output = set(tokens[:num_prompt_tokens]), Counter(tokens[num_prompt_tokens:])
    return [output[t] + (IN_PROMPT if t in prompt else 0) for t in range(VOCAB_SIZE)]


TOKENS = st.integers(0, VOCAB_SIZE - 1)


@settings(max_examples=30)
@given(
    prompts=st.lists(st.lists(TOKENS, min_size=2, max_size=6), min_size=1, max_size=9),
    data=st.data(),
)
def test_counts_follow_sequences_that_the_host_does_not_see(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    counts = TokenCounts(VOCAB_SIZE, CPU)
    # What the host knows stays as it was when the rows were added.
    histories = dict(enumerate(prompts))
    sequences = {row_id: list(prompt) for row_id, prompt in histories.items()}
    for _ in range(5):
        chosen = data.draw(st.sets(st.sampled_from(sorted(sequences)), min_size=1))
        # A row that leaves out a first step is counted when it comes.
        rows = {row_id: histories[row_id] for row_id in sorted(chosen)}
        lengths = [len(sequences[row_id]) for row_id in rows]
        counted = _of_rows(counts, rows, lengths)
        assert _counted(counted) == [_expected(sequences[row_id]) for row_id in rows]
        sampled = data.draw(st.lists(TOKENS, min_size=len(rows), max_size=len(rows)))
        counts.add(counted, torch.tensor(sampled, dtype=torch.int32))
        for row_id, token in zip(rows, sampled, strict=True):
            sequences[row_id].append(token)


def test_counts_begin_anew_when_the_row_is_another() -> None:
    counts = TokenCounts(VOCAB_SIZE, CPU)
    counts.add(_of_rows(counts, {4: [1, 2, 3]}), torch.tensor([5], dtype=torch.int32))
    # As many tokens, and the same row id.
    assert _counted(_of_rows(counts, {4: [1, 2, 3, 7]})) == [_expected([1, 2, 3, 7])]


def test_counts_begin_anew_when_a_token_was_sampled_in_vain() -> None:
    counts, history = TokenCounts(VOCAB_SIZE, CPU), [1, 2, 3]
    counts.add(_of_rows(counts, {4: history}), torch.tensor([5], dtype=torch.int32))
    assert _counted(_of_rows(counts, {4: history})) == [_expected([1, 2, 3])]


def test_counts_stop_at_the_position_when_the_history_goes_on() -> None:
    counts = TokenCounts(VOCAB_SIZE, CPU)
    assert _counted(_of_rows(counts, {0: [1, 2, 3, 4]}, [3])) == [_expected([1, 2, 3])]


def test_counts_stay_when_a_row_samples_nothing() -> None:
    counts = TokenCounts(VOCAB_SIZE, CPU)
    counted = _of_rows(counts, {0: [1, 2], 1: [3, 3]})
    counts.add(counted, torch.tensor([-1, 4], dtype=torch.int32))
    assert _counted(counted) == [_expected([1, 2]), _expected([3, 3, 4])]


def test_counts_are_taken_from_histories_when_they_were_forgotten() -> None:
    counts, history = TokenCounts(VOCAB_SIZE, CPU), [1, 2, 3]
    counts.add(_of_rows(counts, {4: history}), torch.tensor([5], dtype=torch.int32))
    counts.forget()
    history.append(6)
    assert _counted(_of_rows(counts, {9: [0, 0], 4: history})) == [
        _expected([0, 0]),
        _expected([1, 2, 3, 6]),
    ]


def test_counting_takes_as_many_operations_when_there_are_more_new_rows() -> None:
    """A device takes a thousand operations ahead: beyond that, the host waits for it."""

    def operations(num_rows: int) -> list[str]:
        counts, mode = TokenCounts(VOCAB_SIZE, CPU), _Operations()
        with mode:
            _of_rows(counts, {row_id: [1, 2, row_id % VOCAB_SIZE] for row_id in range(num_rows)})
        return mode.names

    assert operations(300) == operations(1)


def test_counts_are_right_when_histories_are_counted_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_counts, "_TOKENS_AT_A_TIME", 8)
    histories = {0: [1, 2, 3, 1, 1], 1: [4] * 20, 2: [5, 6], 3: [7, 7, 7]}
    counted = _counted(_of_rows(TokenCounts(VOCAB_SIZE, CPU), histories))
    assert counted == [_expected(history) for history in histories.values()]


def test_part_has_the_rows_of_a_slice() -> None:
    counts = TokenCounts(VOCAB_SIZE, CPU)
    rows, row_ids = np.array([1, 3, 4]), np.array([7, 8, 9], np.int32)
    histories = [[1], [2], [3]]
    ones = np.ones(3, np.int32)
    part = counts.of_rows(rows, row_ids, histories, ones, ones).part(slice(2, 4))
    assert (part.rows.tolist(), part.row_ids.tolist()) == ([1], [8])
    assert _counted(part) == [_expected([2], 1)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`names`: of all operations of torch, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        _types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class _Pinned(HostStreams):
    """Of a device with memory of its own; `sent`: bytes of what went there from pinned memory."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    @property
    def shares_memory(self) -> bool:
        return False

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        self.sent.append(len(source))
        super().copy_to_device(source, target)


def test_history_goes_to_the_device_from_pinned_memory_once() -> None:
    streams, history = _Pinned(), [number % VOCAB_SIZE for number in range(30_000)]
    counts = TokenCounts(VOCAB_SIZE, CPU, Uploads(CPU, streams, 2**16))
    for length in (30_000, 30_001):
        counted = _of_rows(counts, {4: history}, [length])
        assert _counted(counted) == [_expected(history)]
        counts.add(counted, torch.tensor([5], dtype=torch.int32))
        history.append(5)
    # With its line and two lengths; a quarter of what may be pinned at a time.
    assert (sum(streams.sent), max(streams.sent)) == (4 * 30_000 + 3 * 8, 2**14)
