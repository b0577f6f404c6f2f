from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from executor_service.model import LoadedModel
from executor_service.runner import CacheConfig, build_runner, run_in_parts, scores_too_much
from executor_service.runner import forward_pass as scored_parts
from executor_service.steps import BlockMoves, RowStatus, SamplingParams, StepInput, StepOutput
from tests.support.steps.step_driver import GREEDY, Row, make_step

_LIMIT = 3
_SCORED = SamplingParams(temperature=0.0, num_logprobs=1, num_prompt_logprobs=2)
_PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
_LEANING = [*_PROMPT[:4], 20, 21, 22]
# The second leans on block 1, which the fourth fills. The third's last prompt tokens come later.
_ROWS = (
    Row([30, 31, 32], 0, (2,), 3),
    Row(_LEANING[4:], 4, (1, 3), 7, params=_SCORED, history=_LEANING),
    Row([40, 41, 42, 43, 44], 0, (4, 5), 9, samples=False, params=_SCORED, history=list(range(9))),
    Row(_PROMPT, 0, (1, 6, 7), 10, params=replace(_SCORED, num_prompt_logprobs=0), history=_PROMPT),
    Row([50], 0, (8,), 1, params=GREEDY),
)


@pytest.fixture(autouse=True)
def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scored_parts, "MAX_SCORED_TOKENS", _LIMIT)


class _Recorder:
    """A runner on pools of its own, which fails the rows with the ids `failing`. One at a time."""

    def __init__(self, loaded: LoadedModel, failing: Sequence[int] = ()) -> None:
        self._runner = build_runner(loaded, CacheConfig(4, num_device_blocks=9, num_host_blocks=0))
        self._failing = failing
        self.steps: list[StepInput] = []

    def execute(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        output = self._runner._begin(step).finish()
        for row in np.flatnonzero(np.isin(step.row_ids, self._failing)).tolist():
            output.row_statuses[row] = RowStatus.FAILED
            output = replace(output, row_errors={**output.row_errors, row: "asked for"})
        return output


def test_run_in_parts_returns_the_same_when_it_cuts_rows(loaded: LoadedModel) -> None:
    step = make_step(_ROWS)
    expected = _Recorder(loaded).execute(step)
    recorder = _Recorder(loaded)
    actual = run_in_parts(step, recorder.execute)
    assert len(recorder.steps) > 4
    assert actual.row_statuses.tolist() == [RowStatus.OK] * 5
    assert actual.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
    for name in ("logprobs", "prompt_logprobs"):
        columns, others = getattr(actual, name), getattr(expected, name)
        for column in ("row_indexes", "positions", "token_ids", "ranks", "top_offsets"):
            np.testing.assert_array_equal(getattr(columns, column), getattr(others, column))
        np.testing.assert_array_equal(columns.top_token_ids, others.top_token_ids)
        np.testing.assert_allclose(columns.logprobs, others.logprobs, atol=1e-4)
        np.testing.assert_allclose(columns.top_logprobs, others.top_logprobs, atol=1e-4)


def test_run_in_parts_limits_scored_tokens_of_each_part(
    loaded: LoadedModel,
) -> None:
    recorder = _Recorder(loaded)
    run_in_parts(make_step(_ROWS), recorder.execute)
    assert max(int(scored_parts._num_scored(step).sum()) for step in recorder.steps) == _LIMIT
    assert sum(int(step.num_new_tokens.sum()) for step in recorder.steps) == 22


def test_run_in_parts_moves_blocks_once_when_there_are_parts(loaded: LoadedModel) -> None:
    copy = BlockMoves(np.array([2], np.int32), np.array([0], np.int32))
    recorder = _Recorder(loaded)
    run_in_parts(make_step(_ROWS, copy=copy), recorder.execute)
    assert [len(step.copy.sources) for step in recorder.steps] == [1] + [0] * (
        len(recorder.steps) - 1
    )


def test_run_in_parts_fails_one_row_when_its_part_fails(loaded: LoadedModel) -> None:
    output = run_in_parts(make_step(_ROWS), _Recorder(loaded, failing=[3]).execute)
    ok, failed = RowStatus.OK, RowStatus.FAILED
    assert output.row_statuses.tolist() == [ok, ok, ok, failed, ok]
    assert output.row_errors == {3: "asked for"}
    assert output.sampled_token_ids[3] == -1
    assert output.prompt_logprobs is not None
    assert 3 not in output.prompt_logprobs.row_indexes


@pytest.mark.parametrize(
    ("num_prompt_tokens", "params", "is_cut"),
    [(_LIMIT + 1, _SCORED, False), (_LIMIT + 2, _SCORED, True), (_LIMIT + 2, GREEDY, False)],
)
def test_a_step_is_cut_when_it_scores_more_than_the_limit(
    num_prompt_tokens: int, params: SamplingParams, is_cut: bool
) -> None:
    row = replace(_ROWS[3], num_prompt_tokens=num_prompt_tokens, params=params)
    assert scores_too_much(make_step([row])) == is_cut


def test_the_runner_cuts_steps_that_score_much(loaded: LoadedModel) -> None:
    config = CacheConfig(4, num_device_blocks=9, num_host_blocks=0)
    step = make_step(_ROWS)
    whole = _Recorder(loaded).execute(step)
    cut = build_runner(loaded, config).execute(step)
    assert cut.sampled_token_ids.tolist() == whole.sampled_token_ids.tolist()
    assert cut.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert cut.prompt_logprobs.token_ids.tolist() == whole.prompt_logprobs.token_ids.tolist()
