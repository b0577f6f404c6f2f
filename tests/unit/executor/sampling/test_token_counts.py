"""Counts that are kept from step to step against those counted anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor_service.device.streams import HostStreams
from executor_service.device.uploads import Uploads
from executor_service.sampling import token_counts
from executor_service.sampling.token_counts import IN_PROMPT, CountedRows, TokenCounts
from tests.support.devices.no_waits import nobody_waits

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


@given(
    prompts=st.lists(st.lists(TOKENS, min_size=2, max_size=6), min_size=1, max_size=9),
    data=st.data(),
)
def test_counts_are_those_of_the_sequence_when_the_host_hears_of_no_token(
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


def test_counting_waits_for_nothing_when_rows_are_new() -> None:
    with nobody_waits():
        _of_rows(TokenCounts(VOCAB_SIZE, CPU), {0: [1, 2, 3], 1: [4]})


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
