"""Which steps are left to a model that runs on by itself, and what is made of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.kv_cache import KVCache
from executor_service.errors import StepFailed
from executor_service.model.input_batch import InputBatch
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.model_runner import ModelRunner
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import RowStatus, StepInput, StepOutput
from splitserve_kernels.decoder_inputs import RunRows
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import GREEDY, Row, make_step

BLOCK_SIZE = 4
NAN_TOKEN = 90
TABLE = (0, 1, 2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(ModelConfig(str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))))


class _NextToken:
    """Says after each token that the next one in the vocabulary follows, and NaN after one."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_passes = 0
        # Of each run, how many tokens its rows were allowed.
        self.runs: list[list[int]] = []
        self.error: Exception | None = None

    def logits(self, batch: InputBatch) -> Tensor:
        self.num_passes += 1
        token_ids = batch.input_ids[0][batch.logits_index]
        logits = torch.zeros(len(token_ids), self._vocab_size)
        logits[torch.arange(len(token_ids)), token_ids + 1] = 9.0
        logits[token_ids == NAN_TOKEN] = torch.nan
        return logits

    @property
    def can_run(self) -> bool:
        return True

    def decode_run(self, batch: InputBatch, rows: RunRows) -> Tensor:
        self.runs.append(rows.num_tokens.tolist())
        if self.error is not None:
            raise self.error
        tokens = np.full((len(rows), rows.max_num_tokens), -1, np.int32)
        for row, last in enumerate(batch.input_ids[0].tolist()):
            stops = rows.stop_token_ids[slice(*rows.stop_offsets[row : row + 2].tolist())]
            for index in range(int(rows.num_tokens[row])):
                if last + index == NAN_TOKEN:
                    break
                tokens[row, index] = last + index + 1
                if tokens[row, index] in stops:
                    break
        return torch.from_numpy(tokens)


@pytest.fixture
def model(loaded: LoadedModel) -> _NextToken:
    return _NextToken(loaded.vocab_size)


@pytest.fixture
def runner(loaded: LoadedModel, model: _NextToken) -> ModelRunner:
    cache = KVCache(loaded.layers, BLOCK_SIZE, 20, 0, loaded.dtype, loaded.device)
    return ModelRunner(loaded, cache, model)


def _step(rows: Sequence[Row], *num_run_on: int) -> StepInput:
    return replace(make_step(rows), num_run_on_tokens=np.array(num_run_on, np.int32))


def _decode(token_id: int, params: SamplingParams = GREEDY, num_computed: int = 2) -> Row:
    return Row([token_id], num_computed, TABLE, num_prompt_tokens=2, params=params)


def _tokens(output: StepOutput) -> list[list[int]]:
    return [output.token_ids_of(row) for row in range(len(output.row_statuses))]


def test_rows_get_their_tokens_in_one_call_when_they_are_plain(
    runner: ModelRunner, model: _NextToken
) -> None:
    ends = replace(GREEDY, stop_token_ids=frozenset({42, 43}))
    output = runner.execute(_step([_decode(5), _decode(40, ends), _decode(20)], 3, 8, 0))
    assert _tokens(output) == [[6, 7, 8, 9], [41, 42], [21]]
    assert output.sampled_token_ids.tolist() == [9, 42, 21]
    assert (model.runs, model.num_passes) == ([[4, 9, 1]], 0)


def test_row_has_invalid_logits_when_its_first_ones_are_and_ends_when_later_ones_are(
    runner: ModelRunner,
) -> None:
    output = runner.execute(
        _step([_decode(NAN_TOKEN), _decode(NAN_TOKEN - 2), _decode(1)], 3, 3, 1)
    )
    assert _tokens(output) == [[], [NAN_TOKEN - 1, NAN_TOKEN], [2, 3]]
    assert output.row_statuses.tolist() == [RowStatus.INVALID_LOGITS, RowStatus.OK, RowStatus.OK]
    assert list(output.row_errors) == [0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logit_bias={7: 1.0}),
        SamplingParams(temperature=0.0, num_logprobs=1),
        SamplingParams(temperature=0.0, suppressed_token_ids=(3,)),
    ],
)
def test_step_goes_by_turns_when_a_row_is_not_plain(
    runner: ModelRunner, model: _NextToken, params: SamplingParams
) -> None:
    output = runner.execute(_step([_decode(5), _decode(40, params)], 2, 2))
    assert _tokens(output) == [[6, 7, 8], [41, 42, 43]]
    assert (model.runs, model.num_passes) == ([], 3)


def test_rest_goes_in_one_call_when_only_the_first_turn_is_not_plain(
    runner: ModelRunner, model: _NextToken
) -> None:
    prompt = Row([4, 8], 0, TABLE, num_prompt_tokens=2)
    scored = _decode(60, SamplingParams(temperature=0.0, num_logprobs=0))
    output = runner.execute(_step([prompt, scored, _decode(30)], 3, 0, 1))
    assert _tokens(output) == [[9, 10, 11, 12], [61], [31, 32]]
    assert (model.runs, model.num_passes) == ([[3, 1]], 1)


def test_model_is_asked_for_no_more_than_its_longest_sequence_has_room_for(
    loaded: LoadedModel, runner: ModelRunner, model: _NextToken
) -> None:
    row = _decode(5, num_computed=loaded.max_model_len - 3)
    table = list(range(-(-loaded.max_model_len // BLOCK_SIZE)))
    runner.execute(_step([replace(row, block_table=table), _decode(40)], 7, 4))
    assert model.runs[0] == [3, 5]


def test_step_fails_when_the_model_raises(runner: ModelRunner, model: _NextToken) -> None:
    model.error = ValueError("asked for")
    with pytest.raises(StepFailed, match="ValueError"):
        runner.execute(_step([_decode(5)], 2))


def test_row_keeps_what_it_has_when_the_model_raises_later(
    runner: ModelRunner, model: _NextToken
) -> None:
    model.error = ValueError("asked for")
    output = runner.execute(_step([Row([4, 8], 0, TABLE, num_prompt_tokens=2)], 2))
    assert _tokens(output) == [[9]]
