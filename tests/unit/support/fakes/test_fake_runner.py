"""Tests that the fake runner notices what a scheduler can do wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from executor_service.steps import BlockMoves, RowStatus, StepInput
from tests.support.fakes.fake_runner import FakeRunner, StepFault, expected_tokens
from tests.support.steps.step_driver import Row, make_step

PROMPT = [3, 1, 4, 1, 5, 9]


def _runner(**changes: object) -> FakeRunner:
    sizes: dict[str, object] = {"block_size": 4, "num_device_blocks": 16, "num_host_blocks": 4}
    return FakeRunner(**(sizes | changes))  # type: ignore[arg-type]


def _row(
    tokens: list[int], start: int = 0, table: tuple[int, ...] = (0, 1), adapter: str = ""
) -> Row:
    return Row(tokens, start, table, num_prompt_tokens=len(PROMPT), adapter=adapter)


def _moves(*pairs: tuple[int, int]) -> BlockMoves:
    sources, destinations = np.array(pairs, np.int32).T
    return BlockMoves(sources, destinations)


@pytest.mark.parametrize(
    ("rows", "position", "block"),
    [
        # Never computed; overwritten; at another place; not copied to where it is read.
        ([_row([9], start=6)], 0, 0),
        ([_row(PROMPT), _row([8, 8], table=(0,)), _row([2], start=6)], 2, 0),
        ([_row([*PROMPT, 2, 6]), _row([2], start=8, table=(1, 0, 2))], 0, 1),
        ([_row(PROMPT), _row([2], start=6, table=(0, 9))], 4, 9),
    ],
)
def test_violation_is_listed_when_a_block_holds_something_else(
    rows: list[Row], position: int, block: int
) -> None:
    runner = _runner()
    for step_id, row in enumerate(rows, 1):
        runner.execute(make_step([row], step_id=step_id))
    assert runner.violations == [
        f"step {len(rows)}: row 0 reads something else at position {position}, block {block}"
    ]


def test_blocks_are_spoiled_when_their_row_fails() -> None:
    runner = _runner(fault=lambda step: StepFault(rows={0: RowStatus.FAILED}))
    output = runner.execute(make_step([_row(PROMPT)]))
    runner.fault = lambda step: StepFault()
    runner.execute(make_step([_row([2], start=6)], step_id=2))
    assert (output.row_statuses.tolist(), len(runner.violations)) == ([RowStatus.FAILED], 1)


def test_blocks_are_spoiled_when_the_step_fails() -> None:
    def fail_first(step: StepInput) -> StepFault:
        return StepFault(error=RuntimeError("asked for") if step.step_id == 1 else None)

    runner = _runner(fault=fail_first)
    with pytest.raises(RuntimeError, match="asked for"):
        runner.execute(make_step([_row(PROMPT)]))
    runner.execute(make_step([_row([2], start=6)], step_id=2))
    assert len(runner.violations) == 1


def test_violation_is_listed_when_a_history_is_another() -> None:
    runner = _runner()
    row = Row(PROMPT, 0, (0, 1), num_prompt_tokens=6, history=[*PROMPT[:-1], 7])
    runner.execute(make_step([row]))
    assert len(runner.violations) == 1


ENCODER = [27, 18, 28, 18, 28]
VOCAB_SIZE = 10**6


def _large_runner(window: int | None = None) -> FakeRunner:
    return _runner(vocab_size=VOCAB_SIZE, sliding_window_tokens=window)


def _truth(tokens: list[int], **options: object) -> int:
    return expected_tokens(tokens, 1, 0, VOCAB_SIZE, **options)[0]  # type: ignore[arg-type]


# -- adapters --------------------------------------------------------------------------------------


def test_blocks_are_noticed_when_they_were_computed_with_another_adapter() -> None:
    runner = _large_runner()
    runner.execute(make_step([_row(PROMPT, adapter="a")]))
    output = runner.execute(make_step([_row([2], start=6, adapter="b")], step_id=2))
    assert output.sampled_token_ids.tolist() != [_truth([*PROMPT, 2], adapter="b")]
    assert runner.violations == ["step 2: row 0 reads something else at position 0, block 0"]


# -- encoder tokens --------------------------------------------------------------------------------


def _cross_row(tokens: list[int], start: int = 0, table: tuple[int, ...] = (0, 1)) -> Row:
    row = _row(tokens, start, table)
    return replace(row, cross_blocks=(8, 9), num_encoder=len(ENCODER))


@pytest.mark.parametrize("block", [8, 9])
def test_cross_block_is_noticed_when_it_was_overwritten(block: int) -> None:
    runner = _large_runner()
    runner.execute(make_step([replace(_cross_row(PROMPT), encoder=ENCODER)]))
    runner.spoil([block])
    runner.execute(make_step([_cross_row([2], start=6)], step_id=2))
    assert f"encoder position {4 * (block - 8)}, block {block}" in runner.violations[0]


def test_blocks_are_noticed_when_they_were_computed_with_other_encoder_tokens() -> None:
    runner = _large_runner()
    runner.execute(make_step([replace(_cross_row(PROMPT), encoder=ENCODER)]))
    other = replace(_cross_row([2], start=6), encoder=[1, 2, 3, 4, 5])
    runner.execute(make_step([other], step_id=2))
    assert runner.violations == ["step 2: row 0 reads something else at position 0, block 0"]


def test_cross_blocks_are_noticed_when_two_rows_fill_them() -> None:
    runner = _large_runner()
    row = replace(_cross_row(PROMPT), encoder=ENCODER)
    runner.execute(make_step([row, replace(row, block_table=(2, 3))]))
    assert len(runner.violations) == 1


def test_cross_blocks_are_spoiled_when_their_row_fails() -> None:
    runner = _large_runner()
    runner.fault = lambda step: StepFault(rows={0: RowStatus.FAILED})
    runner.execute(make_step([replace(_cross_row(PROMPT), encoder=ENCODER)]))
    runner.fault = lambda step: StepFault()
    runner.execute(make_step([_cross_row(PROMPT)], step_id=2))
    assert runner.violations == [
        "step 2: row 0 reads something else at encoder position 0, block 8"
    ]


# -- sliding windows -------------------------------------------------------------------------------


def test_block_is_noticed_when_it_was_taken_back_too_early() -> None:
    runner = _large_runner(5)
    runner.execute(make_step([_row([*PROMPT, 2, 6])]))
    # The token at position 8 reads from position 4 on, in block 1.
    runner.spoil([1])
    row = _row([5], start=8, table=(-1, 1, 2))
    output = runner.execute(make_step([row], step_id=2))
    assert output.sampled_token_ids.tolist() != [_truth([*PROMPT, 2, 6, 5], window=5)]
    assert runner.violations == ["step 2: row 0 reads something else at position 4, block 1"]


def test_block_is_noticed_when_its_entry_is_missing_but_needed() -> None:
    runner = _large_runner(6)
    runner.execute(make_step([_row([*PROMPT, 2, 6])]))
    runner.execute(make_step([_row([5], start=8, table=(-1, 1, 2))], step_id=2))
    assert runner.violations == ["step 2: row 0 reads something else at position 3, block -1"]


def test_durations_follow_from_the_step_when_they_are_asked_for() -> None:
    runner = FakeRunner(block_size=4, num_device_blocks=4, us_per_block=7, us_per_token=3)
    output = runner.execute(make_step([_row(PROMPT)], copy=_moves((2, 3))))
    assert (output.move_us, output.forward_us) == (7, 18)
