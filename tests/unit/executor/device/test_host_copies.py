"""Whether a step waits for its device once the model has been asked for logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from executor_service.device import to_device, to_host
from executor_service.model import InputBatch, LoadedModel
from executor_service.runner import CacheConfig, ModelRunner
from executor_service.steps import AwaitedTokens, RowStatus, SamplingParams
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.steps.step_driver import GREEDY, Row, make_step

CPU = torch.device("cpu")
# What makes a GPU's caller wait for a number: said by methods of tensors, and by operators.
WAITING_METHODS = {
    getattr(Tensor, name)
    for name in ("cpu", "tolist", "item", "__bool__", "__int__", "__float__", "__index__")
}
WAITING_OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func in WAITING_METHODS:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        name = func._schema.name
        indexes = args[1] if name in ("aten::index", "aten::index_put_") else ()
        if name in WAITING_OPERATORS or any(
            index is not None and index.dtype == torch.bool for index in indexes
        ):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class CountingModel:
    """Gives random logits; from the first ones on, `waits` counts who waits for the device."""

    vocab_size: int
    waits: Counter[str] = field(default_factory=Counter)
    modes: ExitStack = field(default_factory=ExitStack)
    nan_line: int | None = None

    def logits(self, batch: InputBatch) -> Tensor:
        count = len(batch.logits_index)
        logits = torch.randn(count, self.vocab_size, generator=torch.Generator().manual_seed(1))
        if self.nan_line is not None:
            logits[self.nan_line] = torch.nan
        self.modes.enter_context(_Methods(self.waits))
        self.modes.enter_context(_Operators(self.waits))
        return logits


@pytest.fixture
def model(loaded: LoadedModel) -> Iterator[CountingModel]:
    model = CountingModel(loaded.vocab_size)
    with model.modes:
        yield model


@pytest.fixture
def streams() -> LateStreams:
    return LateStreams()


@pytest.fixture
def runner(loaded: LoadedModel, model: CountingModel, streams: LateStreams) -> ModelRunner:
    return late_runner(loaded, CacheConfig(4, 20, 0), streams, lambda *_: model)


def _row(params: SamplingParams) -> Row:
    history = [5, 6, 7] if params.needs_history else None
    return Row([5, 6, 7], 0, (0,), 3, params=params, history=history)


RANDOM = SamplingParams(temperature=0.7)
PENALIZED = SamplingParams(repetition_penalty=1.5, logit_bias={3: 1.0})
CONSTRAINED = SamplingParams(
    allowed_token_ids=(1, 2, 3), bad_words_token_ids=((1,), (6, 7, 2)), logit_bias={9: -math.inf}
)


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        ([GREEDY], {}),
        ([GREEDY, RANDOM, GREEDY, RANDOM], {}),
        ([PENALIZED, GREEDY], {}),
        ([CONSTRAINED, GREEDY], {}),
        ([CONSTRAINED, CONSTRAINED], {}),
        ([GREEDY, SamplingParams(num_logprobs=3)], {}),
        ([GREEDY, SamplingParams(num_logprobs=3, num_prompt_logprobs=2)], {}),
        # For where top-p cuts.
        ([SamplingParams(top_p=0.9), SamplingParams(top_k=4)], {"cpu": 1}),
    ],
)
def test_begin_copies_once_and_waits_for_nothing_when_rows_sample(
    runner: ModelRunner,
    model: CountingModel,
    streams: LateStreams,
    params: list[SamplingParams],
    waits: dict[str, int],
) -> None:
    pending = runner.begin(make_step([_row(row_params) for row_params in params]))
    assert pending is not None
    assert (model.waits, streams.num_waits, streams.num_copies) == (waits, 0, 1)
    assert (pending.finish().sampled_token_ids >= 0).all()


def test_begin_waits_for_nothing_when_it_takes_tokens_from_the_device(
    runner: ModelRunner, model: CountingModel
) -> None:
    runner.begin(make_step([_row(GREEDY), _row(RANDOM)]))
    row = Row([0], 3, (0,), 3)
    both = AwaitedTokens(np.array([0, 1]), np.array([1, 1]))
    runner.begin(replace(make_step([row, row], step_id=2), awaited=both))
    mixed = AwaitedTokens(np.array([0, 2]), np.array([2, 1]))
    runner.begin(replace(make_step([row, _row(GREEDY), row], step_id=3), awaited=mixed))
    assert not model.waits


def test_execute_leaves_scores_out_when_a_row_has_no_token(
    runner: ModelRunner, model: CountingModel
) -> None:
    model.nan_line = 1
    output = runner.execute(make_step([_row(SamplingParams(num_logprobs=2))] * 3))
    assert output.row_statuses[1] == RowStatus.INVALID_LOGITS
    assert output.logprobs is not None
    assert output.logprobs.row_indexes.tolist() == [0, 2]
    assert output.logprobs.token_ids.tolist() == output.sampled_token_ids[[0, 2]].tolist()
    assert output.logprobs.top_offsets.tolist() == [0, 2, 4]


def test_to_host_returns_the_same_numbers_for_mixed_dtypes() -> None:
    tensors = (
        torch.tensor([[1, -2], [3, 2**31 - 1]], dtype=torch.int32),
        torch.tensor([0.5, -torch.inf, torch.nan]),
        torch.empty(4, 0),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    )
    arrays = to_host(*tensors)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_to_device_gives_back_what_it_was_given() -> None:
    array = np.array([[1.5, 2.5]])
    assert to_device(array, CPU).tolist() == array.tolist()
