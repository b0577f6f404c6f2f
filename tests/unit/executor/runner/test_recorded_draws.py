"""Recorded decodes that draw their tokens and are replayed back to back, against turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.model import LoadedModel
from executor_service.runner import (
    CacheConfig,
    ModelRunner,
    StepGraphs,
    build_runner,
    decode_shapes,
)
from executor_service.sampling import SamplingRows, StaticDraw, draw_in_torch
from executor_service.steps import SamplingParams, StepInput, StepOutput
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.devices.recorded_ops import RecordedOps, SortingDraw, static_model
from tests.support.models.tiny_models import load_tiny_model
from tests.support.steps.step_driver import Row, make_step
from tests.unit.executor.runner.recorded_steps import (
    BLOCK_SIZE,
    MAX_NUM_ROWS,
    MAX_NUM_TOKENS,
    NUM_BLOCKS,
    TABLE_WIDTH,
    cache_of,
    random_decodes,
    random_mixture,
    recorded_models,
)

PLAIN = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.2, top_k=7, top_p=0.8, min_p=0.01),
)
# So many blocks has each row.
_WIDTH = 6


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp(request.param)
    return load_tiny_model(request.param, directory, max_model_len=TABLE_WIDTH * BLOCK_SIZE)


def _runner(loaded: LoadedModel, static_draw: StaticDraw | None) -> tuple[ModelRunner, RecordedOps]:
    """With a draw its rows run on alone, else they go by turns."""
    config = CacheConfig(BLOCK_SIZE, NUM_BLOCKS, num_host_blocks=0)
    recorder = RecordedOps()
    make = recorded_models(static_model, lambda: recorder, static_draw).make
    runner = build_runner(loaded, config, make)
    assert runner.runs_on_alone == (static_draw is not None)
    generator = torch.Generator().manual_seed(3)
    for pool in (*runner.cache.key_pools, *runner.cache.value_pools):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    recorder.num_replayed = 0
    return runner, recorder


def _rows(generator: random.Random, num_rows: int) -> list[Row]:
    """Decodes with blocks to run on in."""
    free = list(range(NUM_BLOCKS))
    generator.shuffle(free)
    return [
        Row(
            [generator.randrange(3, 150)],
            generator.randrange(9),
            [free.pop() for _ in range(_WIDTH)],
            1,
            params=generator.choice(PLAIN),
            seed=generator.randrange(100),
        )
        for _ in range(num_rows)
    ]


def _step(rows: Sequence[Row], num_run_on: Sequence[int]) -> StepInput:
    return replace(make_step(rows), num_run_on_tokens=np.array(num_run_on, np.int32))


def _tokens(output: StepOutput) -> list[list[int]]:
    return [output.token_ids_of(row) for row in range(len(output.row_statuses))]


def _slots(rows: Sequence[Row], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Where rows write what they are to read, if they get so many tokens."""
    return [
        (row.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
        for row, count in zip(rows, counts, strict=True)
        for position in range(row.num_computed, row.num_computed + count)
    ]


def test_tokens_and_pools_are_those_of_turns_when_recorded(
    loaded: LoadedModel,
) -> None:
    (alone, recorder), (by_turns, _) = _runner(loaded, SortingDraw()), _runner(loaded, None)
    generator = random.Random(31)
    for num_rows in (1, 5, 2, 6):
        rows = _rows(generator, num_rows)
        lengths = [generator.randrange(10) for _ in rows]
        most = max(lengths) + 1
        recorder.num_replayed = 0
        outputs = [runner.execute(_step(rows, lengths)) for runner in (alone, by_turns)]
        tokens = _tokens(outputs[0])
        assert [len(each) for each in tokens] == [length + 1 for length in lengths]
        assert tokens == _tokens(outputs[1])
        assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
        # A decode and what leads to the next one, for each token.
        assert recorder.num_replayed == 2 * most
        pools = [runner.cache.key_pools[-1] for runner in (alone, by_turns)]
        for place in _slots(rows, [length + 1 for length in lengths]):
            torch.testing.assert_close(pools[0][place], pools[1][place], atol=1e-4, rtol=0)


def test_pools_keep_what_others_have_when_rows_run_on(loaded: LoadedModel) -> None:
    runner, _ = _runner(loaded, SortingDraw())
    before = [pool.clone() for pool in runner.cache.key_pools]
    rows = _rows(random.Random(32), 3)
    runner.execute(_step(rows, [9, 0, 3]))
    written = set(_slots(rows, [10, 1, 4]))
    for pool, old in zip(runner.cache.key_pools, before, strict=True):
        changed = (pool != old).flatten(2).any(-1).nonzero().tolist()
        assert {(block, offset) for block, offset in changed} <= written


def test_row_has_nothing_behind_a_stop_token_when_it_runs_on(loaded: LoadedModel) -> None:
    runner, _ = _runner(loaded, SortingDraw())
    rows = _rows(random.Random(33), 3)
    free = _tokens(runner.execute(_step(rows, [8, 8, 8])))
    stop = free[1][4]
    rows[1] = replace(rows[1], params=replace(rows[1].params, stop_token_ids=frozenset({stop, 2})))
    tokens = _tokens(runner.execute(_step(rows, [8, 8, 8])))
    assert tokens == [free[0], free[1][: free[1].index(stop) + 1], free[2]]


def test_step_brings_one_token_when_the_host_would_wait(
    loaded: LoadedModel,
) -> None:
    make = recorded_models(static_model, RecordedOps, SortingDraw()).make
    config = CacheConfig(BLOCK_SIZE, NUM_BLOCKS, num_host_blocks=0)
    runner = late_runner(loaded, config, LateStreams(), make)
    rows = _rows(random.Random(34), 3)
    plain = runner.execute(_step(rows, [4, 4, 4]))
    assert [len(tokens) for tokens in _tokens(plain)] == [5, 5, 5]
    rows[2] = replace(rows[2], params=SamplingParams(temperature=0.0, num_logprobs=1))
    output = runner.execute(_step(rows, [4, 4, 4]))
    assert [len(tokens) for tokens in _tokens(output)] == [1, 1, 1]
    assert output.runs is not None


class _GoesNowhere(SortingDraw):
    """Draws the next token with the random number of the last one."""

    def advance(self, words: Tensor, num_positions: Tensor) -> None:
        pass


def test_rows_do_not_run_on_when_draws_do_not_advance(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = recorded_models(static_model, RecordedOps, _GoesNowhere()).make(
        loaded, cache_of(loaded)
    )
    assert isinstance(model, StepGraphs)
    assert model.num_graphs == len(decode_shapes(MAX_NUM_ROWS))
    assert not model.can_run
    assert "kind=run reason='draws of" in caplog.text


ALL_PLAIN = (*PLAIN, SamplingParams(temperature=1.0, num_logprobs=2))
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


def test_graphs_draw_the_tokens_that_are_drawn_outside(
    loaded: LoadedModel,
) -> None:
    recorded, plain, draw = _drawing_runners(loaded)
    generator = random.Random(21)
    for num_rows, first in ((6, 0), (5, 1), (1, 0), (3, 2), (2, 3), (4, 1)):
        rows = _asking(random_decodes(generator, num_rows), ALL_PLAIN[first:] + ALL_PLAIN[:first])
        outputs = [runner.execute(make_step(rows)) for runner in (recorded, plain)]
        assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
        assert (outputs[0].logprobs is None) == (outputs[1].logprobs is None)
    assert draw.num_asked == 0


def test_tokens_are_drawn_outside_when_more_than_logits_decides(loaded: LoadedModel) -> None:
    recorded, plain, draw = _drawing_runners(loaded)
    rows = random_decodes(random.Random(22), 5)
    step = make_step(_asking(rows, (PENALIZED, *ALL_PLAIN)))
    outputs = [runner.execute(step) for runner in (recorded, plain)]
    assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
    assert draw.num_asked == 1


def test_graphs_draw_for_the_rows_that_sample_when_others_do_not(loaded: LoadedModel) -> None:
    recorded, plain, draw = _drawing_runners(loaded, MAX_NUM_TOKENS)
    generator = random.Random(23)
    for num_decodes, lengths in ((4, []), (3, [6]), (2, [4, 5])):
        rows = _asking(random_mixture(generator, num_decodes, lengths), ALL_PLAIN)
        silent = generator.randrange(len(rows))
        rows[silent] = replace(rows[silent], samples=False)
        outputs = [runner.execute(make_step(rows)) for runner in (recorded, plain)]
        assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
    assert draw.num_asked == 0


class _DrawsLate(SortingDraw):
    """Draws something else each time that it is asked."""

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        return super().draw(logits, words) + self.num_drawn


def test_graphs_are_not_used_when_they_draw_other_tokens(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    make = recorded_models(static_model, RecordedOps, _DrawsLate()).make
    assert not isinstance(make(loaded, cache_of(loaded)), StepGraphs)
    assert "draw different tokens" in caplog.text
