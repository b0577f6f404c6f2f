"""Steps whose rows run on inside the model, on a device in time and on one that is late."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.device import KVCache
from executor_service.errors import StepFailed
from executor_service.model import Adapter, InputBatch, LoadedModel
from executor_service.runner import CacheConfig, ModelRunner
from executor_service.service import decode_batch
from executor_service.steps import (
    SAMPLING_FEATURES,
    Feature,
    RowStatus,
    SamplingParams,
    StepAnswer,
    StepExecutor,
    StepInput,
    StepOutput,
)
from splitserve_kernels.decoder_inputs import RunRows
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.models.tiny_models import VOCAB_SIZE
from tests.support.steps.batches import NewRow, Sender, WorkRow
from tests.support.steps.step_driver import GREEDY, Row, make_executor_info, make_step

BLOCK_SIZE = 4
NAN_TOKEN = 90
TABLE = (0, 1, 2)


class _NextToken:
    """Model after whose tokens the next one in the vocabulary follows, and NaN after NAN_TOKEN.

    As on a device, a row that has ended goes on. `places`: positions of each pass and run;
    `runs`: how many tokens the rows of each run may get. Runs raise `error`, if there is one.
    """

    can_run = True

    def __init__(self) -> None:
        self.places: list[list[int]] = []
        self.runs: list[list[int]] = []
        self.error: Exception | None = None

    @property
    def num_passes(self) -> int:
        return len(self.places) - len(self.runs)

    def can_run_adapted(self, adapters: Collection[Adapter]) -> bool:
        return not adapters

    def logits(self, batch: InputBatch) -> Tensor:
        self.places.append(batch.position_ids[0].tolist())
        token_ids = batch.input_ids[0][batch.logits_index]
        logits = torch.zeros(len(token_ids), VOCAB_SIZE)
        logits[torch.arange(len(token_ids)), token_ids + 1] = 9.0
        logits[token_ids == NAN_TOKEN] = torch.nan
        return logits

    def decode_run(self, batch: InputBatch, rows: RunRows) -> Tensor:
        self.places.append(batch.position_ids[0].tolist())
        self.runs.append(rows.num_tokens.tolist())
        if self.error is not None:
            raise self.error
        tokens = batch.input_ids[0].to(torch.int32)[:, None] + 1 + torch.arange(rows.max_num_tokens)
        tokens[tokens == NAN_TOKEN + 1] = -1
        is_beyond = torch.arange(rows.max_num_tokens) >= torch.from_numpy(rows.num_tokens)[:, None]
        return tokens.masked_fill(is_beyond, -1).to(torch.int32)


@pytest.fixture
def model() -> _NextToken:
    return _NextToken()


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


def test_row_fails_at_first_nan_logits_and_ends_at_later_ones(
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


def test_rest_goes_in_one_call_after_a_turn_that_is_not_plain(
    runner: ModelRunner, model: _NextToken
) -> None:
    prompt = Row([4, 8], 0, TABLE, num_prompt_tokens=2)
    scored = _decode(60, SamplingParams(temperature=0.0, num_logprobs=0))
    output = runner.execute(_step([prompt, scored, _decode(30)], 3, 0, 1))
    assert _tokens(output) == [[9, 10, 11, 12], [61], [31, 32]]
    assert (model.runs, model.num_passes) == ([[3, 1]], 1)


def test_run_ends_at_the_longest_sequence_of_the_model(
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


POOLS = CacheConfig(block_size=4, num_device_blocks=64, num_host_blocks=0)
STOP = 70


@dataclass(slots=True)
class Late:
    """An executor whose device is late, and what it has answered."""

    executor: StepExecutor
    model: _NextToken
    streams: LateStreams
    answers: list[StepAnswer] = field(default_factory=list)
    step_id: int = 0
    sender: Sender = field(default_factory=lambda: Sender(50, 1000))

    def begin(self, work: Sequence[WorkRow], new: Sequence[NewRow] = ()) -> None:
        """Each step on the one before."""
        self.step_id += 1
        batch = self.sender.batch(self.step_id, base=self.step_id - 1 or None, new=new, work=work)
        self.executor.begin(decode_batch(batch), self.answers.append)

    def tokens(self) -> list[list[list[int]]]:
        """Of each answer, of each row, when all is done."""
        self.streams.advance()
        self.executor.finish()
        found = []
        for answer in self.answers:
            output = answer.output
            assert output is not None, answer
            found.append([output.token_ids_of(row) for row in range(len(output.row_statuses))])
        return found

    def statuses(self, answer: int) -> list[int]:
        """Of the rows of an answer."""
        output = self.answers[answer].output
        assert output is not None
        statuses: list[int] = output.row_statuses.tolist()
        return statuses


@pytest.fixture
def late(loaded: LoadedModel, model: _NextToken) -> Late:
    streams = LateStreams()
    runner = late_runner(loaded, POOLS, streams, lambda _loaded, _cache: model)
    info = make_executor_info(
        executor_epoch=1000,
        vocab_size=VOCAB_SIZE,
        num_device_blocks=64,
        features=SAMPLING_FEATURES | {Feature.SEVERAL_TOKENS},
    )
    return Late(StepExecutor(info, runner), model, streams)


def _new_row(row_id: int) -> NewRow:
    blocks = range(16 * row_id, 16 * row_id + 16)
    return NewRow(row_id, blocks, 1, {"stop_token_ids": [STOP]})


def test_step_begins_where_a_run_ends_when_that_is_not_over(late: Late) -> None:
    new = [_new_row(0), _new_row(1)]
    late.begin([WorkRow(0, 0, [5], run_on=3), WorkRow(1, 0, [20], run_on=1)], new)
    late.begin([WorkRow(0, 4, back=1, run_on=2), WorkRow(1, 2, back=1, run_on=0)])
    late.begin([WorkRow(0, 7, back=1), WorkRow(1, 3, back=1)])
    assert not late.answers
    assert late.streams.num_waits == 0
    assert late.tokens() == [[[6, 7, 8, 9], [21, 22]], [[10, 11, 12], [23]], [[13], [24]]]
    assert late.model.places == [[0, 0], [4, 2], [7, 3]]


def test_next_step_has_no_input_when_a_run_ends(late: Late) -> None:
    new = [_new_row(0), _new_row(1)]
    late.begin([WorkRow(0, 0, [STOP - 2], run_on=3), WorkRow(1, 0, [20], run_on=3)], new)
    late.begin([WorkRow(0, 4, back=1, run_on=2), WorkRow(1, 4, back=1, run_on=1)])
    late.begin([WorkRow(0, 7, back=1), WorkRow(1, 6, back=1)])
    tokens = late.tokens()
    assert tokens == [[[STOP - 1, STOP], [21, 22, 23, 24]], [[], [25, 26]], [[], [27]]]
    for answer in (1, 2):
        assert late.statuses(answer) == [RowStatus.INPUT_UNAVAILABLE, RowStatus.OK]


def test_next_step_says_invalid_logits_when_a_run_ended_before_them(late: Late) -> None:
    """As if it had begun behind the last token."""
    new = [_new_row(0), _new_row(1)]
    late.begin([WorkRow(0, 0, [NAN_TOKEN - 2], run_on=3), WorkRow(1, 0, [20], run_on=3)], new)
    late.begin([WorkRow(0, 4, back=1, run_on=2), WorkRow(1, 4, back=1, run_on=1)])
    late.begin([WorkRow(0, 7, back=1), WorkRow(1, 6, back=1)])
    tokens = late.tokens()
    assert tokens == [[[NAN_TOKEN - 1, NAN_TOKEN], [21, 22, 23, 24]], [[], [25, 26]], [[], [27]]]
    assert late.statuses(0) == [RowStatus.OK, RowStatus.OK]
    assert late.statuses(1) == [RowStatus.INVALID_LOGITS, RowStatus.OK]
    assert late.statuses(2) == [RowStatus.INPUT_UNAVAILABLE, RowStatus.OK]


def test_row_is_one_token_further_when_its_step_was_shortened(late: Late) -> None:
    scored = NewRow(0, range(16), 1, {"stop_token_ids": [STOP], "num_logprobs": 0})
    late.begin([WorkRow(0, 0, [5], run_on=3)], [scored])
    late.begin([WorkRow(0, 4, back=1, run_on=3)])
    assert late.streams.num_waits == 0
    assert late.tokens() == [[[6]], [[7]]]
    assert late.model.places == [[0], [1]]


def test_step_with_drafts_waits_for_a_run(late: Late) -> None:
    late.begin([WorkRow(0, 0, [5], run_on=1)], [_new_row(0)])
    late.begin([WorkRow(0, 2, back=1, run_on=1, drafts=[8, 9, 50])])
    assert late.tokens() == [[[6, 7]], [[8, 9, 10, 11]]]
