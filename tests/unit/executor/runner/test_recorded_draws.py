"""Recorded steps that draw their tokens, against draws outside."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.runner.step_graphs import StepGraphs
from executor_service.sampling.sampler import SamplingRows, draw_in_torch
from executor_service.steps.sampling_params import SamplingParams
from tests.support.devices.recorded_ops import RecordedOps, static_model
from tests.support.devices.static_draw import SortingDraw
from tests.support.steps.step_driver import Row, make_step
from tests.unit.executor.runner.recorded_steps import (
    BLOCK_SIZE,
    MAX_NUM_TOKENS,
    NUM_BLOCKS,
    cache_of,
    random_decodes,
    random_mixture,
    recorded_models,
)

PLAIN = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.2, top_k=7, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=1.0, num_logprobs=2),
)
PENALIZED = SamplingParams(temperature=0.9, repetition_penalty=1.5)


class _Refusing:
    """A Draw that says when it is asked."""

    num_asked = 0

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        self.num_asked += 1
        return draw_in_torch(logits, rows)


def _drawing_runners(
    loaded: LoadedModel, max_num_tokens: int = 0
) -> tuple[ModelRunner, ModelRunner, _Refusing]:
    """One that draws in its recordings, one that never does, and what the first draws with else."""
    config = CacheConfig(BLOCK_SIZE, NUM_BLOCKS, num_host_blocks=0)
    recorded = recorded_models(static_model, RecordedOps, SortingDraw(), max_num_tokens).make
    draw = _Refusing()
    plain = recorded_models(static_model, RecordedOps, None, max_num_tokens).make
    return build_runner(loaded, config, recorded, draw), build_runner(loaded, config, plain), draw


def _asking(rows: list[Row], params: Sequence[SamplingParams]) -> list[Row]:
    return [
        replace(row, params=params[i % len(params)], seed=i * 7 - 3, history=[5, *row.tokens] * 30)
        for i, row in enumerate(rows)
    ]


def test_graphs_draw_the_tokens_that_are_drawn_outside_when_nothing_else_decides(
    loaded: LoadedModel,
) -> None:
    recorded, plain, draw = _drawing_runners(loaded)
    generator = random.Random(21)
    for num_rows, first in ((6, 0), (5, 1), (1, 0), (3, 2), (2, 3), (4, 1)):
        rows = _asking(random_decodes(generator, num_rows), PLAIN[first:] + PLAIN[:first])
        outputs = [runner.execute(make_step(rows)) for runner in (recorded, plain)]
        assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
        assert (outputs[0].logprobs is None) == (outputs[1].logprobs is None)
    assert draw.num_asked == 0


def test_tokens_are_drawn_outside_when_more_than_logits_decides(loaded: LoadedModel) -> None:
    recorded, plain, draw = _drawing_runners(loaded)
    rows = random_decodes(random.Random(22), 5)
    step = make_step(_asking(rows, (PENALIZED, *PLAIN)))
    outputs = [runner.execute(step) for runner in (recorded, plain)]
    assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
    assert draw.num_asked == 1


def test_graphs_draw_for_the_rows_that_sample_when_others_do_not(loaded: LoadedModel) -> None:
    recorded, plain, draw = _drawing_runners(loaded, MAX_NUM_TOKENS)
    generator = random.Random(23)
    for num_decodes, lengths in ((4, []), (3, [6]), (2, [4, 5])):
        rows = _asking(random_mixture(generator, num_decodes, lengths), PLAIN)
        silent = generator.randrange(len(rows))
        rows[silent] = replace(rows[silent], samples=False)
        outputs = [runner.execute(make_step(rows)) for runner in (recorded, plain)]
        assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
    assert draw.num_asked == 0


class _DrawsLate(SortingDraw):
    """Draws something else each time that it is asked."""

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        return super().draw(logits, words) + self.num_drawn


def test_graphs_say_an_error_and_serve_without_when_they_draw_another_token(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    make = recorded_models(static_model, RecordedOps, _DrawsLate()).make
    assert not isinstance(make(loaded, cache_of(loaded)), StepGraphs)
    assert "draw another token" in caplog.text
