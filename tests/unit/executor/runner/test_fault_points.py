"""What goes wrong in a real step, seen from the contract: one row or one step, never the process.

Each test ends with a step that builds on the one at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from executor_service.device import KVCache
from executor_service.model import InputBatch, LoadedModel, PagedModel, TransformersModel
from executor_service.runner import CacheConfig, ModelRunner, build_runner
from executor_service.sampling import SamplingRows, draw_in_torch
from executor_service.service import decode_batch
from executor_service.steps import (
    SAMPLING_FEATURES,
    ExecutorLimits,
    Feature,
    RowStatus,
    StepAnswer,
    StepErrorReason,
    StepExecutor,
    StepOutput,
    StepStatus,
)
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import UNIT_SCALES, AttentionOptions, KVScales, PagedBatch
from tests.support.models.tiny_models import VOCAB_SIZE
from tests.support.steps.batches import NewRow, Sender, WorkRow
from tests.support.steps.step_driver import make_executor_info

SENDER = Sender(1, 1)
BLOCK_SIZE = 4
# The row in the middle is the one at fault.
PROMPTS = ([5, 6, 7], [8, 9], [20, 21, 22, 23])
NEW_ROWS = [NewRow(row, (row,), num_prompt=len(PROMPTS[row])) for row in range(3)]
WORK = [WorkRow(row, 0, prompt) for row, prompt in enumerate(PROMPTS)]
OK, FAILED, INVALID_LOGITS = RowStatus.OK, RowStatus.FAILED, RowStatus.INVALID_LOGITS


def _nothing() -> None:
    pass


@dataclass(slots=True)
class _Faults:
    """What happens in the parts of a step; by itself, nothing does."""

    attend: Callable[[PagedBatch], None] = lambda _batch: None
    sample: Callable[[], None] = _nothing
    change_logits: Callable[[InputBatch, Tensor], None] = lambda _batch, _logits: None

    def make_model(self, loaded: LoadedModel, cache: KVCache) -> PagedModel:
        return _Model(loaded, cache, self)

    def draw(self, adjusted: Tensor, rows: SamplingRows) -> Tensor:
        self.sample()
        return draw_in_torch(adjusted, rows)

    # An attention backend.

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        scales: KVScales = UNIT_SCALES,
    ) -> None:
        reference.write_kv(key, value, keys, values, batch, scales)

    def paged_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        self.attend(batch)
        return reference.paged_attention(query, keys, values, batch, options, scales)


class _Model:
    def __init__(self, loaded: LoadedModel, cache: KVCache, faults: _Faults) -> None:
        self.model = TransformersModel(loaded, cache, faults)
        self.faults = faults

    def logits(self, batch: InputBatch) -> Tensor:
        logits = self.model.logits(batch)
        self.faults.change_logits(batch, logits)
        return logits


@dataclass(frozen=True, slots=True)
class _Executor:
    """A step executor around a real runner, and what it does when nothing is wrong."""

    faults: _Faults
    runner: ModelRunner
    steps: StepExecutor
    expected: list[int]

    def step(self, step_id: int, rows: list[NewRow] | None = None) -> StepAnswer:
        """The first step is a snapshot with `rows`; others compute the same work again."""
        new, base = (rows or NEW_ROWS, None) if step_id == 1 else ([], step_id - 1)
        batch = SENDER.batch(step_id, base=base, new=new, work=WORK, swap_out=[(3, 0)])
        return self.steps.execute(decode_batch(batch))

    def assert_works(self, step_id: int) -> None:
        """The next step is as if nothing had been."""
        output = _output(self.step(step_id))
        assert (output.row_statuses.tolist(), output.sampled_token_ids.tolist()) == (
            [OK] * 3,
            self.expected,
        )


@pytest.fixture
def executor(loaded: LoadedModel) -> _Executor:
    faults = _Faults()
    cache_config = CacheConfig(BLOCK_SIZE, num_device_blocks=8, num_host_blocks=2)
    runner = build_runner(loaded, cache_config, faults.make_model, faults.draw)
    info = make_executor_info(
        vocab_size=VOCAB_SIZE,
        num_device_blocks=8,
        num_host_blocks=2,
        limits=ExecutorLimits(max_adapters_per_step=2),
        features=SAMPLING_FEATURES | {Feature.ADAPTERS},
    )
    executor = _Executor(faults, runner, StepExecutor(info, runner), [])
    executor.expected.extend(_output(executor.step(1)).sampled_token_ids.tolist())
    return replace(executor, steps=StepExecutor(info, runner))


def _output(answer: StepAnswer) -> StepOutput:
    assert answer.status is StepStatus.OK, answer
    assert answer.output is not None
    return answer.output


def _assert_only_the_second_fails(
    executor: _Executor, output: StepOutput, status: RowStatus
) -> None:
    assert output.row_statuses.tolist() == [OK, status, OK]
    first, _, last = executor.expected
    assert output.sampled_token_ids.tolist() == [first, -1, last]
    assert list(output.row_errors) == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_row_fails_alone_when_its_logits_are_not_finite(executor: _Executor, value: float) -> None:
    def change(_batch: InputBatch, logits: Tensor) -> None:
        logits[1, 17] = value

    executor.faults.change_logits = change
    output = _output(executor.step(1))
    _assert_only_the_second_fails(executor, output, INVALID_LOGITS)
    assert output.row_errors[1] == "the model returned logits with NaN or +inf, or only -inf"
    executor.faults.change_logits = lambda _batch, _logits: None
    executor.assert_works(2)


def test_row_fails_alone_when_its_adapter_is_missing(executor: _Executor) -> None:
    new_rows = [NEW_ROWS[0], replace(NEW_ROWS[1], adapter="french"), NEW_ROWS[2]]
    for step_id in (1, 2):
        output = _output(executor.step(step_id, new_rows))
        _assert_only_the_second_fails(executor, output, FAILED)
        assert output.row_errors == {1: "adapter 'french' is not available; available: none"}


def test_every_row_fails_when_every_adapter_is_missing(executor: _Executor) -> None:
    output = _output(executor.step(1, [replace(row, adapter="french") for row in NEW_ROWS]))
    assert output.row_statuses.tolist() == [FAILED] * 3
    assert output.sampled_token_ids.tolist() == [-1] * 3


def _raise_for_the_second(batch: PagedBatch) -> None:
    if int((batch.block_tables == 1).sum()):
        raise ValueError("secret prompt text")


def test_row_fails_alone_when_a_kernel_raises_for_it(
    executor: _Executor, caplog: pytest.LogCaptureFixture
) -> None:
    executor.faults.attend = _raise_for_the_second
    output = _output(executor.step(1))
    _assert_only_the_second_fails(executor, output, FAILED)
    assert output.row_errors == {1: "ValueError in the forward pass"}
    assert "forward_failed" in caplog.text
    executor.faults.attend = lambda _batch: None
    executor.assert_works(2)


def test_rows_fail_for_their_own_reasons_when_several_faults_meet(executor: _Executor) -> None:
    executor.faults.attend = _raise_for_the_second
    output = _output(executor.step(1, [replace(NEW_ROWS[0], adapter="french"), *NEW_ROWS[1:]]))
    assert output.row_errors == {
        0: "adapter 'french' is not available; available: none",
        1: "ValueError in the forward pass",
    }
    assert output.sampled_token_ids.tolist() == [-1, -1, executor.expected[2]]


def test_step_fails_when_a_kernel_raises_for_every_row(executor: _Executor) -> None:
    def attend(_batch: PagedBatch) -> None:
        raise ValueError("secret prompt text")

    executor.faults.attend = attend
    answer = executor.step(1)
    assert answer.status is StepStatus.FAILED
    assert answer.error is not None
    assert answer.error.reason is StepErrorReason.INTERNAL
    message = "all rows failed; last error: ValueError in the forward pass"
    assert answer.error.message == message
    executor.faults.attend = lambda _batch: None
    executor.assert_works(2)


def _no_memory() -> None:
    raise MemoryError


def _no_device_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _more_than_there_is() -> None:
    torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("fault", [_no_memory, _no_device_memory, _more_than_there_is])
@pytest.mark.parametrize("part", ["move", "forward", "sample"])
def test_step_fails_when_memory_runs_out_in_it(
    executor: _Executor,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    fault: Callable[[], None],
) -> None:
    released: list[torch.device] = []
    monkeypatch.setattr(
        "executor_service.runner.model_runner.release_cached_memory",
        lambda device: released.append(device),
    )
    with monkeypatch.context() as patch:
        if part == "move":
            patch.setattr(executor.runner.cache, "swap_out", lambda _moves: fault())
        elif part == "forward":
            executor.faults.attend = lambda _batch: fault()
        else:
            executor.faults.sample = fault
        answer = executor.step(1)
    assert answer.status is StepStatus.FAILED
    assert answer.error is not None
    assert (answer.error.reason, answer.error.message) == (
        StepErrorReason.OUT_OF_MEMORY,
        "out of memory",
    )
    executor.faults.attend, executor.faults.sample = lambda _batch: None, _nothing
    executor.assert_works(2)
    executor.assert_works(3)
    # Once, and before the step after it: what another step left behind is in its way.
    assert released == [torch.device("cpu")]
