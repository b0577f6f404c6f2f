"""The fake is only worth something if it notices what a scheduler can do wrong."""

from __future__ import annotations

import numpy as np
import pytest

from executor_service.steps.step import BlockMoves, RowStatus, StepInput
from tests.support.fakes.fake_runner import FakeRunner, StepFault, expected_tokens
from tests.support.steps.step_driver import DrivenSequence, Row, drive, make_step

PROMPT = [3, 1, 4, 1, 5, 9]


def _runner(**changes: object) -> FakeRunner:
    sizes: dict[str, object] = {"block_size": 4, "num_device_blocks": 16, "num_host_blocks": 4}
    return FakeRunner(**(sizes | changes))  # type: ignore[arg-type]


def _row(tokens: list[int], start: int = 0, table: tuple[int, ...] = (0, 1)) -> Row:
    return Row(tokens, start, table, num_prompt_tokens=len(PROMPT))


def _moves(*pairs: tuple[int, int]) -> BlockMoves:
    sources, destinations = np.array(pairs, np.int32).T
    return BlockMoves(sources, destinations)


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_tokens_are_the_expected_ones_when_sequences_are_driven(chunk_size: int | None) -> None:
    runner = _runner(num_device_blocks=64)
    prompts = [PROMPT, [7], [2] * 9]
    sequences = [DrivenSequence(prompt, 7, start_step=i) for i, prompt in enumerate(prompts)]
    drive(runner, sequences, block_size=4, num_blocks=64, chunk_size=chunk_size)
    assert [s.output for s in sequences] == [expected_tokens(p, 7, 0, 128) for p in prompts]
    assert runner.violations == []


def test_violation_is_listed_when_a_block_was_never_computed() -> None:
    runner = _runner()
    runner.execute(make_step([_row([9], start=6)]))
    assert runner.violations == ["step 1: row 0 reads something else at position 0, block 0"]


def test_violation_is_listed_when_an_early_block_was_overwritten() -> None:
    runner = _runner()
    runner.execute(make_step([_row(PROMPT)]))
    runner.execute(make_step([_row([8, 8], table=(0,))], step_id=2))
    runner.execute(make_step([_row([2], start=6)], step_id=3))
    assert runner.violations == ["step 3: row 0 reads something else at position 2, block 0"]


def test_violation_is_listed_when_a_block_is_at_another_place() -> None:
    runner = _runner()
    runner.execute(make_step([_row([*PROMPT, 2, 6])]))
    runner.execute(make_step([_row([2], start=8, table=(1, 0, 2))], step_id=2))
    assert len(runner.violations) == 1


def test_violation_is_listed_when_a_copy_is_missing() -> None:
    runner = _runner()
    runner.execute(make_step([_row(PROMPT)]))
    runner.execute(make_step([_row([2], start=6, table=(0, 9))], step_id=2))
    assert len(runner.violations) == 1


def test_blocks_come_back_when_they_were_swapped() -> None:
    runner = _runner()
    runner.execute(make_step([_row(PROMPT)]))
    runner.execute(make_step([], swap_out=_moves((0, 3), (1, 2)), step_id=2))
    runner.spoil([0, 1])
    swap_in, copy = _moves((3, 5), (2, 6)), _moves((5, 7), (6, 8))
    rows = [_row([2], start=6, table=(7, 8))]
    output = runner.execute(make_step(rows, swap_in=swap_in, copy=copy, step_id=3))
    tokens = expected_tokens([*PROMPT, 2], 1, 0, 128)
    assert (output.sampled_token_ids.tolist(), runner.violations) == (tokens, [])


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


def test_tokens_depend_on_the_seed_when_temperature_is_positive() -> None:
    assert expected_tokens(PROMPT, 8, 1, 10**6) != expected_tokens(PROMPT, 8, 2, 10**6)
