"""Adapters, encoder tokens and sliding windows of the fake: what it must notice there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from executor_service.steps.step import BlockMoves, RowStatus
from tests.support.fakes.fake_runner import FakeRunner, StepFault, expected_tokens
from tests.support.steps.step_driver import Row, make_step

PROMPT = [3, 1, 4, 1, 5, 9]
ENCODER = [27, 18, 28, 18, 28]
VOCAB_SIZE = 10**6


def _runner(window: int | None = None) -> FakeRunner:
    return FakeRunner(
        block_size=4,
        num_device_blocks=16,
        num_host_blocks=4,
        vocab_size=VOCAB_SIZE,
        sliding_window_tokens=window,
    )


def _row(
    tokens: list[int], start: int = 0, table: tuple[int, ...] = (0, 1), adapter: str = ""
) -> Row:
    return Row(tokens, start, table, num_prompt_tokens=len(PROMPT), adapter=adapter)


def _truth(tokens: list[int], **options: object) -> int:
    return expected_tokens(tokens, 1, 0, VOCAB_SIZE, **options)[0]  # type: ignore[arg-type]


def _moves(*pairs: tuple[int, int]) -> BlockMoves:
    sources, destinations = np.array(pairs, np.int32).T
    return BlockMoves(sources, destinations)


# -- adapters --------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_adapter_when_rows_differ_in_it() -> None:
    runner = _runner()
    rows = [
        _row(PROMPT, table=(2 * i, 2 * i + 1), adapter=name) for i, name in enumerate(["", "a"])
    ]
    first = runner.execute(make_step(rows)).sampled_token_ids.tolist()
    assert first == [_truth(PROMPT), _truth(PROMPT, adapter="a")]
    assert first[0] != first[1]
    assert runner.violations == []


def test_blocks_are_noticed_when_they_were_computed_with_another_adapter() -> None:
    runner = _runner()
    runner.execute(make_step([_row(PROMPT, adapter="a")]))
    output = runner.execute(make_step([_row([2], start=6, adapter="b")], step_id=2))
    assert output.sampled_token_ids.tolist() != [_truth([*PROMPT, 2], adapter="b")]
    assert runner.violations == ["step 2: row 0 reads something else at position 0, block 0"]


# -- encoder tokens --------------------------------------------------------------------------------


def _cross_row(tokens: list[int], start: int = 0, table: tuple[int, ...] = (0, 1)) -> Row:
    row = _row(tokens, start, table)
    return replace(row, cross_blocks=(8, 9), num_encoder=len(ENCODER))


def test_siblings_read_the_encoder_when_one_of_them_brings_its_tokens() -> None:
    runner = _runner()
    sibling = replace(_cross_row(PROMPT, table=(2, 3)), encoder=ENCODER)
    output = runner.execute(make_step([_cross_row(PROMPT), sibling]))
    assert output.sampled_token_ids.tolist() == [_truth(PROMPT, encoder=ENCODER)] * 2
    output = runner.execute(make_step([_cross_row([2], start=6)], step_id=2))
    assert output.sampled_token_ids.tolist() == [_truth([*PROMPT, 2], encoder=ENCODER)]
    assert (runner.violations, _truth(PROMPT) != _truth(PROMPT, encoder=ENCODER)) == ([], True)


def test_cross_blocks_come_back_when_they_were_swapped() -> None:
    runner = _runner()
    runner.execute(make_step([replace(_cross_row(PROMPT), encoder=ENCODER)]))
    runner.execute(make_step([], swap_out=_moves((8, 0), (9, 1)), step_id=2))
    runner.spoil([8, 9])
    row = replace(_cross_row([2], start=6), cross_blocks=(11, 10))
    step = make_step([row], swap_in=_moves((0, 11), (1, 10)), step_id=3)
    assert runner.execute(step).sampled_token_ids.tolist() == [
        _truth([*PROMPT, 2], encoder=ENCODER)
    ]
    assert runner.violations == []


@pytest.mark.parametrize("block", [8, 9])
def test_cross_block_is_noticed_when_it_was_overwritten(block: int) -> None:
    runner = _runner()
    runner.execute(make_step([replace(_cross_row(PROMPT), encoder=ENCODER)]))
    runner.spoil([block])
    runner.execute(make_step([_cross_row([2], start=6)], step_id=2))
    assert f"encoder position {4 * (block - 8)}, block {block}" in runner.violations[0]


def test_blocks_are_noticed_when_they_were_computed_with_other_encoder_tokens() -> None:
    runner = _runner()
    runner.execute(make_step([replace(_cross_row(PROMPT), encoder=ENCODER)]))
    other = replace(_cross_row([2], start=6), encoder=[1, 2, 3, 4, 5])
    runner.execute(make_step([other], step_id=2))
    assert runner.violations == ["step 2: row 0 reads something else at position 0, block 0"]


def test_cross_blocks_are_noticed_when_two_rows_fill_them() -> None:
    runner = _runner()
    row = replace(_cross_row(PROMPT), encoder=ENCODER)
    runner.execute(make_step([row, replace(row, block_table=(2, 3))]))
    assert len(runner.violations) == 1


def test_cross_blocks_are_spoiled_when_their_row_fails() -> None:
    runner = _runner()
    runner.fault = lambda step: StepFault(rows={0: RowStatus.FAILED})
    runner.execute(make_step([replace(_cross_row(PROMPT), encoder=ENCODER)]))
    runner.fault = lambda step: StepFault()
    runner.execute(make_step([_cross_row(PROMPT)], step_id=2))
    assert runner.violations == [
        "step 2: row 0 reads something else at encoder position 0, block 8"
    ]


# -- sliding windows -------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("chunk", [1, 3, 17])
def test_tokens_are_the_expected_ones_when_blocks_behind_the_window_are_gone(
    window: int, chunk: int
) -> None:
    runner = _runner(window)
    prompt = [(7 * i + 3) % 50 for i in range(17)]
    sequence, num_computed = list(prompt), 0
    for step_id in range(1, 40):
        table = list(range(7))
        behind = max(0, num_computed - window + 1) // 4
        runner.spoil(range(behind))
        table[:behind] = [-1] * behind
        pending = sequence[num_computed:][:chunk]
        num_computed += len(pending)
        row = Row(
            pending,
            num_computed - len(pending),
            table,
            len(prompt),
            samples=num_computed == len(sequence),
        )
        sequence += runner.execute(make_step([row], step_id=step_id)).sampled_token_ids.tolist()
        if sequence[-1] < 0:
            sequence.pop()
        if len(sequence) == 26:
            break
    assert sequence == prompt + expected_tokens(prompt, 9, 0, VOCAB_SIZE, window=window)
    assert runner.violations == []


def test_block_is_noticed_when_it_was_taken_back_too_early() -> None:
    runner = _runner(5)
    runner.execute(make_step([_row([*PROMPT, 2, 6])]))
    # The token at position 8 reads from position 4 on, in block 1.
    runner.spoil([1])
    row = _row([5], start=8, table=(-1, 1, 2))
    output = runner.execute(make_step([row], step_id=2))
    assert output.sampled_token_ids.tolist() != [_truth([*PROMPT, 2, 6, 5], window=5)]
    assert runner.violations == ["step 2: row 0 reads something else at position 4, block 1"]


def test_block_is_noticed_when_its_entry_is_missing_but_needed() -> None:
    runner = _runner(6)
    runner.execute(make_step([_row([*PROMPT, 2, 6])]))
    runner.execute(make_step([_row([5], start=8, table=(-1, 1, 2))], step_id=2))
    assert runner.violations == ["step 2: row 0 reads something else at position 3, block -1"]


def test_tokens_differ_when_windows_differ() -> None:
    truths = {_truth(PROMPT, window=window) for window in (1, 2, 3, 6)}
    assert len(truths) == 4
    # Beyond the sequence, a window makes no difference.
    assert _truth(PROMPT, window=6) == _truth(PROMPT, window=60)


def test_durations_follow_from_the_step_when_they_are_asked_for() -> None:
    runner = FakeRunner(block_size=4, num_device_blocks=4, us_per_block=7, us_per_token=3)
    output = runner.execute(make_step([_row(PROMPT)], copy=_moves((2, 3))))
    assert (output.move_us, output.forward_us) == (7, 18)
