"""What a step does besides being right: moves of blocks, failures of rows and of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from executor_service.errors import StepFailed
from executor_service.model import LoadedModel
from executor_service.runner import CacheConfig, ModelRunner, build_runner
from executor_service.steps import RowStatus, SamplingParams
from tests.support.models.tiny_models import load_tiny_model
from tests.support.steps.step_driver import GREEDY, Row, make_moves, make_step

BLOCK_SIZE = 4
BAD_TOKEN = 99


@pytest.fixture
def runner(loaded: LoadedModel) -> ModelRunner:
    return build_runner(loaded, CacheConfig(BLOCK_SIZE, num_device_blocks=20, num_host_blocks=4))


@pytest.fixture
def nan_token(loaded: LoadedModel) -> Iterator[None]:
    """BAD_TOKEN has an embedding of NaN."""
    weight = loaded.model.get_input_embeddings().weight.data  # type: ignore[operator]
    before = weight[BAD_TOKEN].clone()
    weight[BAD_TOKEN] = torch.nan
    yield
    weight[BAD_TOKEN] = before


class _Trap:
    """Raises an error when BAD_TOKEN reaches the embedding."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if bool((args[0] == BAD_TOKEN).any()):
            raise self.error


@pytest.fixture
def trap(loaded: LoadedModel) -> Iterator[_Trap]:
    trap = _Trap(ValueError("secret prompt text"))
    handle = loaded.model.get_input_embeddings().register_forward_pre_hook(trap)  # type: ignore[operator]
    yield trap
    handle.remove()


def _prompt(
    tokens: list[int], *block_table: int, params: SamplingParams = GREEDY, samples: bool = True
) -> Row:
    history = tokens if params.needs_history else None
    return Row(tokens, 0, block_table, len(tokens), samples, params, history=history)


GOOD_ROWS = [_prompt([5, 6, 7], 0), _prompt([8, 9, 10, 11, 12], 1, 2), _prompt([20], 3)]


def test_execute_moves_blocks_when_there_are_no_rows(runner: ModelRunner) -> None:
    runner.cache.key_pools[0][3] = 7.0
    output = runner.execute(make_step([], copy=make_moves((3, 5))))
    assert output.row_statuses.shape == output.sampled_token_ids.shape == (0,)
    assert bool((runner.cache.key_pools[0][5] == 7.0).all())


def test_execute_keeps_the_order_of_phases_when_moves_are_chained(runner: ModelRunner) -> None:
    runner.cache.key_pools[1][0] = 3.0
    # Out of 0, back into 1, on to 2: each phase sees the one before.
    step = make_step(
        [], swap_out=make_moves((0, 2)), swap_in=make_moves((2, 1)), copy=make_moves((1, 2))
    )
    runner.execute(step)
    assert bool((runner.cache.key_pools[1][2] == 3.0).all())


def test_execute_goes_on_from_moved_blocks_when_a_sequence_was_swapped(
    runner: ModelRunner,
) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    first = runner.execute(make_step([_prompt(prompt, 0, 1)])).sampled_token_ids[0]
    tokens = [int(first)]
    expected = runner.execute(make_step([Row(tokens, 6, (0, 1), 6)])).sampled_token_ids[0]
    runner.execute(make_step([], swap_out=make_moves((0, 3), (1, 0))))
    step = make_step([Row(tokens, 6, (9, 8), 6)], swap_in=make_moves((3, 9), (0, 8)))
    assert runner.execute(step).sampled_token_ids[0] == expected


@pytest.mark.parametrize("silent", [(0,), (0, 1, 2)])
def test_execute_gives_no_token_when_rows_do_not_sample(
    runner: ModelRunner, silent: tuple[int, ...]
) -> None:
    rows = [replace(row, samples=index not in silent) for index, row in enumerate(GOOD_ROWS)]
    output = runner.execute(make_step(rows))
    assert [token < 0 for token in output.sampled_token_ids] == [i in silent for i in range(3)]
    assert output.row_statuses.tolist() == [RowStatus.OK] * 3


def test_execute_shares_a_block_filled_in_the_same_step(
    runner: ModelRunner,
) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    expected = runner.execute(make_step([_prompt(prompt, 0, 1)])).sampled_token_ids[0]
    # The row that leans on block 4 comes first in the batch.
    rows = [Row(prompt[4:], 4, (4, 6), 6), _prompt(prompt, 4, 5)]
    assert runner.execute(make_step(rows)).sampled_token_ids.tolist() == [expected, expected]


@pytest.mark.usefixtures("nan_token")
def test_execute_is_unaffected_when_a_block_held_nan_before(runner: ModelRunner) -> None:
    expected = runner.execute(make_step([GOOD_ROWS[1]])).sampled_token_ids.tolist()
    runner.execute(make_step([_prompt([BAD_TOKEN] * 8, 1, 2)]))
    assert runner.execute(make_step([GOOD_ROWS[1]])).sampled_token_ids.tolist() == expected


@pytest.mark.usefixtures("nan_token")
def test_execute_fails_the_row_when_prompt_logits_are_nan(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    tokens = [6, BAD_TOKEN, 8]
    bad = _prompt(tokens, 7, params=params, samples=False)
    good = _prompt([5, 6, 7], 0, params=params)
    output = runner.execute(make_step([bad, good]))
    assert output.row_statuses.tolist() == [RowStatus.INVALID_LOGITS, RowStatus.OK]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs.row_indexes.tolist() == [1, 1]


def test_execute_fails_the_row_when_it_is_alone_and_raises(
    runner: ModelRunner, trap: _Trap
) -> None:
    output = runner.execute(make_step([_prompt([BAD_TOKEN], 7)]))
    assert output.row_statuses.tolist() == [RowStatus.FAILED]
    assert output.sampled_token_ids.tolist() == [-1]


def test_execute_keeps_columns_in_row_order_when_rows_are_retried(
    runner: ModelRunner, trap: _Trap
) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=1)
    prompt = [5, 6, 7, 8, 9, 10]
    # The first row leans on a block of the last one, so they are computed the other way round.
    rows = [
        Row(prompt[4:], 4, (4, 6), 6, params=params),
        _prompt([BAD_TOKEN], 7, params=params),
        _prompt(prompt, 4, 5, params=params),
    ]
    alone = runner.execute(make_step([_prompt(prompt, 0, 1)])).sampled_token_ids[0]
    output = runner.execute(make_step(rows))
    assert output.sampled_token_ids.tolist() == [alone, -1, alone]
    assert output.logprobs is not None
    assert output.logprobs.row_indexes.tolist() == [0, 2]


def test_execute_fails_a_row_when_it_leans_on_a_failed_one(
    runner: ModelRunner, trap: _Trap
) -> None:
    prompt = [5, 6, BAD_TOKEN, 8, 9, 10]
    rows = [Row(prompt[4:], 4, (4, 6), 6), _prompt(prompt, 4, 5), GOOD_ROWS[2]]
    output = runner.execute(make_step(rows))
    assert output.row_statuses.tolist() == [RowStatus.FAILED, RowStatus.FAILED, RowStatus.OK]
    assert "failed row" in output.row_errors[0]


def test_execute_fails_the_step_when_the_device_is_lost(runner: ModelRunner, trap: _Trap) -> None:
    trap.error = torch.AcceleratorError("device-side assert")
    with pytest.raises(StepFailed, match="AcceleratorError"):
        runner.execute(make_step([*GOOD_ROWS, _prompt([BAD_TOKEN], 7)]))


def test_execute_returns_top_logprobs_when_rows_ask_for_different_numbers(
    runner: ModelRunner,
) -> None:
    numbers = (2, None, 0)
    rows = [
        replace(row, params=SamplingParams(temperature=0.0, num_logprobs=number))
        for row, number in zip(GOOD_ROWS, numbers, strict=True)
    ]
    output = runner.execute(make_step(rows))
    columns = output.logprobs
    assert columns is not None
    assert columns.row_indexes.tolist() == [0, 2]
    assert columns.positions.tolist() == [3, 1]
    assert columns.token_ids.tolist() == output.sampled_token_ids[[0, 2]].tolist()
    assert columns.ranks.tolist() == [1, 1]
    assert columns.top_offsets.tolist() == [0, 2, 2]
    assert columns.top_token_ids[0] == output.sampled_token_ids[0]
    assert columns.top_logprobs[0] == columns.logprobs[0] < 0
    assert columns.top_logprobs[1] < columns.top_logprobs[0]


def test_execute_samples_alike_when_the_batch_is_different(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    row = replace(GOOD_ROWS[1], params=params, seed=11)
    alone = runner.execute(make_step([row])).sampled_token_ids[0]
    assert runner.execute(make_step([*GOOD_ROWS[::2], row])).sampled_token_ids[2] == alone


def test_logprobs_are_those_of_the_model_when_tokens_are_forbidden(runner: ModelRunner) -> None:
    free = SamplingParams(temperature=0.0, num_logprobs=3)
    before = runner.execute(make_step([replace(GOOD_ROWS[0], params=free)])).logprobs
    assert before is not None
    best, second, _ = before.top_token_ids.tolist()
    params = replace(free, bad_words_token_ids=((best,),))
    after = runner.execute(make_step([replace(GOOD_ROWS[0], params=params)])).logprobs
    assert after is not None
    assert after.top_token_ids.tolist() == before.top_token_ids.tolist()
    assert after.top_logprobs.tolist() == before.top_logprobs.tolist()
    assert (after.token_ids.tolist(), after.ranks.tolist()) == ([second], [2])


def test_execute_reports_durations_when_it_computes(runner: ModelRunner) -> None:
    output = runner.execute(make_step(GOOD_ROWS))
    assert output.forward_us > 0
    assert output.sample_us > 0


def test_execute_computes_all_logits_when_the_model_cannot_choose(
    loaded: LoadedModel, runner: ModelRunner
) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=0, num_prompt_logprobs=1)
    rows = [replace(row, params=params, history=row.tokens) for row in GOOD_ROWS]
    expected = runner.execute(make_step(rows))
    cache_config = CacheConfig(BLOCK_SIZE, num_device_blocks=20, num_host_blocks=0)
    other = build_runner(replace(loaded, keeps_logits=False), cache_config)
    actual = other.execute(make_step(rows))
    assert actual.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
    assert actual.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    np.testing.assert_allclose(
        actual.prompt_logprobs.logprobs, expected.prompt_logprobs.logprobs, atol=1e-5
    )
    assert all(math.isfinite(value) for value in actual.prompt_logprobs.top_logprobs)


PROMPT = [(11 * i + 5) % 90 for i in range(21)]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny_model("mistral", tmp_path_factory.mktemp("mistral"))


@pytest.fixture
def windowed_runner(windowed: LoadedModel) -> ModelRunner:
    return build_runner(windowed, CacheConfig(BLOCK_SIZE, num_device_blocks=20, num_host_blocks=0))


def _next_row(table: tuple[int, ...]) -> Row:
    """The token after PROMPT, which reads from position 10 on."""
    return Row([7], len(PROMPT), table, len(PROMPT))


def test_execute_is_unaffected_when_blocks_behind_the_window_are_gone(
    windowed_runner: ModelRunner,
) -> None:
    windowed_runner.execute(make_step([Row(PROMPT, 0, range(6), len(PROMPT))]))
    expected = windowed_runner.execute(make_step([_next_row((0, 1, 2, 3, 4, 5))])).sampled_token_ids
    for pool in (*windowed_runner.cache.key_pools, *windowed_runner.cache.value_pools):
        pool[:2] = torch.nan
    for table in ((0, 1, 2, 3, 4, 5), (-1, -1, 2, 3, 4, 5)):
        output = windowed_runner.execute(make_step([_next_row(table)]))
        assert output.sampled_token_ids.tolist() == expected.tolist()


def test_execute_keeps_a_row_whose_old_block_failed(
    windowed: LoadedModel, windowed_runner: ModelRunner
) -> None:
    windowed_runner.execute(make_step([Row(PROMPT, 0, range(6), len(PROMPT))]))
    row = _next_row((0, 1, 2, 3, 4, 5))
    expected = windowed_runner.execute(make_step([row])).sampled_token_ids.tolist()
    embeddings = windowed.model.get_input_embeddings()  # type: ignore[operator]
    handle = embeddings.register_forward_pre_hook(_Trap(ValueError("asked for")))
    output = windowed_runner.execute(make_step([Row([BAD_TOKEN], 0, (1,), 1), row]))
    handle.remove()
    assert output.row_statuses.tolist() == [RowStatus.FAILED, RowStatus.OK]
    assert output.sampled_token_ids.tolist() == [-1, *expected]
