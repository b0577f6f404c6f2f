"""Steps that begin while rows before them run on, and nobody knows yet how far they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.kv_cache import KVCache
from executor_service.model.input_batch import InputBatch
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.pool_sizes import CacheConfig
from executor_service.service.decode_batch import decode_batch
from executor_service.steps.batch import StepAnswer
from executor_service.steps.executor_info import SAMPLING_FEATURES, ExecutorInfo, Feature, ModelInfo
from executor_service.steps.step import RowStatus
from executor_service.steps.step_executor import StepExecutor
from splitserve_kernels.decoder_inputs import RunRows
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.support.steps.batches import NewRow, Sender, WorkRow

POOLS = CacheConfig(block_size=4, num_device_blocks=64, num_host_blocks=0)
STOP, NAN_TOKEN = 70, 90


class _NextToken:
    """Says after each token that the next one in the vocabulary follows, and NaN after one.

    As a device does it: who has ended goes on. `places`: the positions of each pass or run.
    """

    can_run = True

    def __init__(self) -> None:
        self.places: list[list[int]] = []

    def logits(self, batch: InputBatch) -> Tensor:
        self.places.append(batch.position_ids[0].tolist())
        token_ids = batch.input_ids[0][batch.logits_index]
        logits = torch.zeros(len(token_ids), VOCAB_SIZE)
        logits[torch.arange(len(token_ids)), token_ids + 1] = 9.0
        logits[token_ids == NAN_TOKEN] = torch.nan
        return logits

    def decode_run(self, batch: InputBatch, rows: RunRows) -> Tensor:
        self.places.append(batch.position_ids[0].tolist())
        tokens = batch.input_ids[0].to(torch.int32)[:, None] + 1 + torch.arange(rows.max_num_tokens)
        tokens[tokens == NAN_TOKEN + 1] = -1
        is_beyond = torch.arange(rows.max_num_tokens) >= torch.from_numpy(rows.num_tokens)[:, None]
        return tokens.masked_fill(is_beyond, -1).to(torch.int32)


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


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(ModelConfig(str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))))


@pytest.fixture
def late(loaded: LoadedModel) -> Late:
    model, streams = _NextToken(), LateStreams()

    def make_model(_loaded: LoadedModel, _cache: KVCache) -> _NextToken:
        return model

    runner = late_runner(loaded, POOLS, streams, make_model)
    info = ExecutorInfo(
        executor_epoch=1000,
        model=ModelInfo("tiny", "0f", "float32", "float32", VOCAB_SIZE, 64, ()),
        block_size=POOLS.block_size,
        num_device_blocks=64,
        num_host_blocks=0,
        block_bytes=1,
        features=SAMPLING_FEATURES | {Feature.SEVERAL_TOKENS},
    )
    return Late(StepExecutor(info, runner), model, streams)


def _new(row_id: int) -> NewRow:
    blocks = range(16 * row_id, 16 * row_id + 16)
    return NewRow(row_id, blocks, 1, {"stop_token_ids": [STOP]})


def test_step_begins_where_a_run_ends_when_that_is_not_over(late: Late) -> None:
    new = [_new(0), _new(1)]
    late.begin([WorkRow(0, 0, [5], run_on=3), WorkRow(1, 0, [20], run_on=1)], new)
    late.begin([WorkRow(0, 4, back=1, run_on=2), WorkRow(1, 2, back=1, run_on=0)])
    late.begin([WorkRow(0, 7, back=1), WorkRow(1, 3, back=1)])
    assert not late.answers
    assert late.streams.num_waits == 0
    assert late.tokens() == [[[6, 7, 8, 9], [21, 22]], [[10, 11, 12], [23]], [[13], [24]]]
    assert late.model.places == [[0, 0], [4, 2], [7, 3]]


def test_next_step_has_no_input_when_a_row_ends_in_a_run(late: Late) -> None:
    new = [_new(0), _new(1)]
    late.begin([WorkRow(0, 0, [STOP - 2], run_on=3), WorkRow(1, 0, [20], run_on=3)], new)
    late.begin([WorkRow(0, 4, back=1, run_on=2), WorkRow(1, 4, back=1, run_on=1)])
    late.begin([WorkRow(0, 7, back=1), WorkRow(1, 6, back=1)])
    tokens = late.tokens()
    assert tokens == [[[STOP - 1, STOP], [21, 22, 23, 24]], [[], [25, 26]], [[], [27]]]
    for answer in (1, 2):
        assert late.statuses(answer) == [RowStatus.INPUT_UNAVAILABLE, RowStatus.OK]


def test_next_step_says_invalid_logits_when_a_run_ended_before_them(late: Late) -> None:
    """As if it had begun behind the last token."""
    new = [_new(0), _new(1)]
    late.begin([WorkRow(0, 0, [NAN_TOKEN - 2], run_on=3), WorkRow(1, 0, [20], run_on=3)], new)
    late.begin([WorkRow(0, 4, back=1, run_on=2), WorkRow(1, 4, back=1, run_on=1)])
    late.begin([WorkRow(0, 7, back=1), WorkRow(1, 6, back=1)])
    tokens = late.tokens()
    assert tokens == [[[NAN_TOKEN - 1, NAN_TOKEN], [21, 22, 23, 24]], [[], [25, 26]], [[], [27]]]
    assert late.statuses(0) == [RowStatus.OK, RowStatus.OK]
    assert late.statuses(1) == [RowStatus.INVALID_LOGITS, RowStatus.OK]
    assert late.statuses(2) == [RowStatus.INPUT_UNAVAILABLE, RowStatus.OK]


def test_row_is_one_token_on_when_its_step_was_shortened_and_is_not_over(late: Late) -> None:
    scored = NewRow(0, range(16), 1, {"stop_token_ids": [STOP], "num_logprobs": 0})
    late.begin([WorkRow(0, 0, [5], run_on=3)], [scored])
    late.begin([WorkRow(0, 4, back=1, run_on=3)])
    assert late.streams.num_waits == 0
    assert late.tokens() == [[[6]], [[7]]]
    assert late.model.places == [[0], [1]]


def test_step_waits_when_it_has_drafts_and_a_run_is_not_over(late: Late) -> None:
    late.begin([WorkRow(0, 0, [5], run_on=1)], [_new(0)])
    late.begin([WorkRow(0, 2, back=1, run_on=1, drafts=[8, 9, 50])])
    assert late.tokens() == [[[6, 7]], [[8, 9, 10, 11]]]
