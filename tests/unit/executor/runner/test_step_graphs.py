"""Recorded decodes against the model that was recorded, over steps whose rows change."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.cuda_graphs import Recorder
from executor_service.device.kv_cache import KVCache
from executor_service.device.streams import HostStreams
from executor_service.device.uploads import Uploads
from executor_service.errors import RecordingFailed
from executor_service.model.input_batch import InputBatch, build_input_batch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel, PagedModel, torch_model
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.runner.recorded_models import RecordedModels
from executor_service.runner.static_inputs import StaticInputs
from executor_service.runner.step_graphs import StepGraphs
from executor_service.runner.step_shapes import decode_shapes, prompt_shapes
from executor_service.sampling.sampler import SamplingRows, draw_in_torch
from executor_service.sampling.static_draw import StaticDraw
from executor_service.steps.sampling_params import SamplingParams
from tests.support.devices.recorded_ops import RecordedOps, static_model
from tests.support.devices.static_draw import SortingDraw
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import DrivenSequence, Row, drive, make_step

BLOCK_SIZE = 4
NUM_BLOCKS = 40
MAX_NUM_ROWS, MAX_NUM_TOKENS = 6, 20
SHAPES = decode_shapes(MAX_NUM_ROWS) + prompt_shapes(MAX_NUM_ROWS, MAX_NUM_TOKENS)
TABLE_WIDTH = 15
# Of float32 logits of about 10; a matrix product may depend on how many rows there are.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(request.param, directory)
    return load_model(ModelConfig(str(directory), max_model_len=TABLE_WIDTH * BLOCK_SIZE))


def _cache(loaded: LoadedModel) -> KVCache:
    return KVCache(loaded.layers, BLOCK_SIZE, NUM_BLOCKS, 0, loaded.dtype, loaded.device)


def _recorded(
    make_model: MakeModel,
    make_recorder: Callable[[], Recorder],
    static_draw: StaticDraw | None = None,
    max_num_tokens: int = 0,
) -> RecordedModels:
    return RecordedModels(make_model, MAX_NUM_ROWS, max_num_tokens, static_draw, make_recorder)


def _logits(model: PagedModel, rows: list[Row]) -> Tensor:
    step = make_step(rows)
    batch = build_input_batch(step, list(range(len(rows))), BLOCK_SIZE, torch.device("cpu"))
    with torch.inference_mode():
        return model.logits(batch).clone()


def _random_decodes(generator: random.Random, num_rows: int, *, samples: bool = True) -> list[Row]:
    free = list(range(NUM_BLOCKS))
    generator.shuffle(free)
    rows = []
    for _ in range(num_rows):
        computed = generator.randrange(24)
        table = [free.pop() for _ in range(computed // BLOCK_SIZE + generator.randint(1, 2))]
        token = generator.randrange(3, 150)
        rows.append(Row([token], computed, table, 1, samples or generator.random() < 0.5))
    return rows


@dataclass(slots=True)
class Pair:
    """A recorded model and its original, each on pools of its own with the same content."""

    graphs: StepGraphs
    recorder: RecordedOps
    original: PagedModel
    caches: tuple[KVCache, KVCache] = field(repr=False)

    def same_pools(self) -> None:
        """Fills both pools with the same numbers."""
        generator = torch.Generator().manual_seed(0)
        for layer in range(len(self.caches[0].key_pools)):
            for pools in ("key_pools", "value_pools"):
                shape = getattr(self.caches[0], pools)[layer].shape
                numbers = torch.randn(shape, generator=generator)
                for cache in self.caches:
                    getattr(cache, pools)[layer].copy_(numbers)


class _Turns:
    """Two models in turns: attention of a loaded model is bound to the one that was made last."""

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        self._loaded, self._cache = loaded, cache

    def logits(self, batch: InputBatch) -> Tensor:
        return static_model(self._loaded, self._cache).logits(batch)


@pytest.fixture
def pair(loaded: LoadedModel) -> Pair:
    caches = (_cache(loaded), _cache(loaded))
    recorder = RecordedOps()
    model = static_model(loaded, caches[0])
    graphs = StepGraphs(model, loaded, caches[0], SHAPES)
    assert not graphs.record(recorder)
    assert recorder.num_recorded == len(SHAPES)
    made = Pair(graphs, recorder, _Turns(loaded, caches[1]), caches)
    made.same_pools()
    recorder.num_replayed = 0
    return made


def _assert_same_pools(pair: Pair) -> None:
    first, second = pair.caches
    for pools in ("key_pools", "value_pools"):
        for a, b in zip(getattr(first, pools), getattr(second, pools), strict=True):
            torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


def test_graphs_say_what_the_model_says_when_rows_come_and_go(pair: Pair) -> None:
    generator = random.Random(1)
    for num_rows in (6, 1, 3, 5, 2, 6, 4, 3, 1):
        rows = _random_decodes(generator, num_rows)
        expected = _logits(pair.original, rows)
        torch.testing.assert_close(_logits(pair.graphs, rows), expected, atol=TOLERANCE, rtol=0)
        _assert_same_pools(pair)
    assert pair.recorder.num_replayed == 9


@pytest.mark.parametrize("num_rows", [shape.num_tokens for shape in decode_shapes(MAX_NUM_ROWS)])
def test_graphs_say_the_same_bits_when_no_row_is_added(pair: Pair, num_rows: int) -> None:
    generator = random.Random(2)
    for _ in range(3):
        rows = [
            # As wide as the buffers: how many numbers are summed decides how they are rounded.
            replace(row, block_table=[*row.block_table, *[0] * TABLE_WIDTH][:TABLE_WIDTH])
            for row in _random_decodes(generator, num_rows)
        ]
        assert torch.equal(_logits(pair.graphs, rows), _logits(pair.original, rows))


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
    recorded = _recorded(static_model, RecordedOps, SortingDraw(), max_num_tokens).make
    draw = _Refusing()
    plain = _recorded(static_model, RecordedOps, None, max_num_tokens).make
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
        rows = _asking(_random_decodes(generator, num_rows), PLAIN[first:] + PLAIN[:first])
        outputs = [runner.execute(make_step(rows)) for runner in (recorded, plain)]
        assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
        assert (outputs[0].logprobs is None) == (outputs[1].logprobs is None)
    assert draw.num_asked == 0


def test_tokens_are_drawn_outside_when_more_than_logits_decides(loaded: LoadedModel) -> None:
    recorded, plain, draw = _drawing_runners(loaded)
    rows = _random_decodes(random.Random(22), 5)
    step = make_step(_asking(rows, (PENALIZED, *PLAIN)))
    outputs = [runner.execute(step) for runner in (recorded, plain)]
    assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
    assert draw.num_asked == 1


def test_graphs_draw_for_the_rows_that_sample_when_others_do_not(loaded: LoadedModel) -> None:
    recorded, plain, draw = _drawing_runners(loaded, MAX_NUM_TOKENS)
    generator = random.Random(23)
    for num_decodes, lengths in ((4, []), (3, [6]), (2, [4, 5])):
        rows = _asking(_random_mixture(generator, num_decodes, lengths), PLAIN)
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
    make = _recorded(static_model, RecordedOps, _DrawsLate()).make
    assert not isinstance(make(loaded, _cache(loaded)), StepGraphs)
    assert "draw another token" in caplog.text


def _random_mixture(
    generator: random.Random, num_decodes: int, lengths: Sequence[int]
) -> list[Row]:
    """Decodes, and rows of several tokens behind some that are computed, in any order."""
    rows = _random_decodes(generator, num_decodes, samples=False)
    free = [i for i in range(NUM_BLOCKS) if all(i not in row.block_table for row in rows)]
    for length in lengths:
        computed = generator.randrange(7)
        table = [free.pop() for _ in range(-(-(computed + length) // BLOCK_SIZE))]
        tokens = [generator.randrange(3, 150) for _ in range(length)]
        rows.append(Row(tokens, computed, table, 30, generator.random() < 0.5))
    generator.shuffle(rows)
    return rows


def test_graphs_say_what_the_model_says_when_prompts_come_beside_decodes(pair: Pair) -> None:
    generator = random.Random(12)
    mixtures = [(0, [2]), (3, [5]), (0, [16]), (1, [2, 3]), (4, [12, 4]), (0, [9, 2, 7]), (5, [3])]
    for number, (num_decodes, lengths) in enumerate(mixtures, start=1):
        rows = _random_mixture(generator, num_decodes, lengths)
        expected = _logits(pair.original, rows)
        torch.testing.assert_close(_logits(pair.graphs, rows), expected, atol=TOLERANCE, rtol=0)
        _assert_same_pools(pair)
        assert pair.recorder.num_replayed == number


def test_steps_are_not_replayed_when_they_ask_for_more_lines_or_tokens_than_there_are(
    pair: Pair,
) -> None:
    generator = random.Random(13)
    scored = SamplingParams(num_prompt_logprobs=0)
    (prompt,) = _random_mixture(generator, 0, [8])
    many = [replace(prompt, params=scored)]
    for rows in (many, _random_mixture(generator, 1, [20])):
        expected = _logits(pair.original, rows)
        torch.testing.assert_close(_logits(pair.graphs, rows), expected, atol=TOLERANCE, rtol=0)
    assert pair.recorder.num_replayed == 0


def test_graphs_leave_the_pools_alone_when_rows_are_added(pair: Pair) -> None:
    before = [pool.clone() for pool in pair.caches[0].key_pools]
    (row,) = _random_decodes(random.Random(3), 1)
    _logits(pair.graphs, [row])
    rows = _random_decodes(random.Random(3), 5)
    _logits(pair.graphs, rows)
    written = {
        row.block_table[row.num_computed // BLOCK_SIZE] * BLOCK_SIZE + row.num_computed % BLOCK_SIZE
        for row in [*rows, row]
    }
    for pool, old in zip(pair.caches[0].key_pools, before, strict=True):
        changed = (pool != old).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert set(changed) <= written


def test_graphs_pick_the_rows_that_sample_when_some_do_not(pair: Pair) -> None:
    generator = random.Random(4)
    for num_rows in (3, 6, 5):
        rows = _random_decodes(generator, num_rows, samples=False)
        expected = _logits(pair.original, rows)
        assert len(expected) == sum(row.samples for row in rows)
        torch.testing.assert_close(_logits(pair.graphs, rows), expected, atol=TOLERANCE, rtol=0)


def test_graphs_score_prompts_when_a_chunk_has_one_token(pair: Pair) -> None:
    rows = _random_decodes(random.Random(5), 3)
    params = SamplingParams(num_prompt_logprobs=0)
    chunk = Row([9], 2, [30, 31], 8, False, params)
    expected = _logits(pair.original, [*rows, chunk])
    actual = _logits(pair.graphs, [*rows, chunk])
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    assert pair.recorder.num_replayed == 1


def test_graphs_read_block_0_when_an_added_row_follows_a_row_without_a_first_block(
    pair: Pair,
) -> None:
    """Behind a sliding window entries are -1."""
    tables = pair.graphs._inputs.tensors(decode_shapes(MAX_NUM_ROWS)[-1]).paged.block_tables
    tables.fill_(-1)
    _logits(pair.graphs, _random_decodes(random.Random(6), 3))
    assert tables[3].tolist()[0] == 0


class _Counting:
    """Counts what is not replayed."""

    def __init__(self, model: PagedModel) -> None:
        self._model, self.count = model, 0

    def logits(self, batch: InputBatch) -> Tensor:
        self.count += 1
        return self._model.logits(batch)


def test_graphs_are_not_used_when_rows_have_several_tokens_or_are_too_many(
    loaded: LoadedModel,
) -> None:
    cache, recorder = _cache(loaded), RecordedOps()
    counting = _Counting(torch_model(loaded, cache))
    shapes = decode_shapes(2)
    graphs = StepGraphs(counting, loaded, cache, shapes)
    graphs._replays = {shape: recorder.record(lambda: None) for shape in shapes}
    generator = random.Random(7)
    _logits(graphs, [Row([5, 6], 0, [0], 2), *_random_decodes(generator, 1)])
    _logits(graphs, _random_decodes(generator, 3))
    assert counting.count == 2
    assert recorder.num_replayed == 0


@pytest.mark.parametrize(
    ("make_model", "fails", "event"),
    [
        (static_model, True, "cuda_graphs_not_recorded"),
        # It decides on the host how many keys a row has.
        (torch_model, False, "cuda_graphs_refused"),
    ],
)
def test_graphs_say_an_error_and_serve_without_when_recording_fails(
    loaded: LoadedModel,
    make_model: MakeModel,
    fails: bool,
    event: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = _cache(loaded)
    recorder = RecordedOps(fails=fails)
    model = _recorded(make_model, lambda: recorder).make(loaded, cache)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert event in errors[0]
    num_tried = recorder.num_replayed
    assert _logits(model, _random_decodes(random.Random(8), 3)).isfinite().all()
    assert recorder.num_replayed == num_tried


def test_graphs_are_not_tried_again_when_they_could_not_be_recorded(loaded: LoadedModel) -> None:
    recorders: list[RecordedOps] = []

    def make_recorder() -> RecordedOps:
        recorders.append(RecordedOps(fails=True))
        return recorders[-1]

    make = _recorded(static_model, make_recorder).make
    for _ in range(2):
        make(loaded, _cache(loaded))
    assert len(recorders) == 1


def test_steps_are_launched_when_recordings_are_left_out(loaded: LoadedModel) -> None:
    """So that what is launched for steps that are not recorded can be compiled before serving."""
    recorder = RecordedOps()
    recorded = _recorded(static_model, lambda: recorder, None, MAX_NUM_TOKENS)
    model = recorded.make(loaded, _cache(loaded))
    assert recorded.recorded is not None
    assert recorded.recorded.num_graphs == len(SHAPES)
    rows = [*_random_decodes(random.Random(14), 2), Row([5, 6, 7], 0, (38,), 3)]
    counts = [recorder.num_replayed]
    with recorded.left_out():
        _logits(model, rows)
        counts.append(recorder.num_replayed)
    _logits(model, rows)
    counts.append(recorder.num_replayed)
    assert (counts[1] - counts[0], counts[2] - counts[1]) == (0, 1)


def test_the_largest_of_each_kind_is_recorded_when_memory_is_measured(loaded: LoadedModel) -> None:
    recorders = [RecordedOps(), RecordedOps()]
    recorded = _recorded(static_model, iter(recorders).__next__, None, MAX_NUM_TOKENS)
    config = CacheConfig(
        BLOCK_SIZE, max_num_rows=2, max_num_batched_tokens=8, max_cpu_pool_bytes=None
    )
    config = replace(config, num_host_blocks=0, max_auto_blocks=60)
    build_runner(loaded, config, recorded.make, make_measured=recorded.make_largest)
    assert [recorder.num_recorded for recorder in recorders] == [2, len(SHAPES)]


class _BreaksOff(RecordedOps):
    """In the middle of a recording."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RecordingFailed("capture was invalidated")


def test_runner_is_not_made_when_a_recording_breaks_off(loaded: LoadedModel) -> None:
    make = _recorded(static_model, _BreaksOff).make
    config = CacheConfig(BLOCK_SIZE, num_device_blocks=60, num_host_blocks=0)
    with pytest.raises(RecordingFailed):
        build_runner(loaded, config, make)
    measured = replace(config, num_device_blocks=None, max_num_rows=2, max_num_batched_tokens=8)
    measured = replace(measured, max_cpu_pool_bytes=None)
    with pytest.raises(RecordingFailed):
        build_runner(loaded, measured, make)


def test_inputs_of_a_step_arrive_in_one_copy_when_they_are_replayed(loaded: LoadedModel) -> None:
    cache, streams = _cache(loaded), _CountedCopies()
    shapes = decode_shapes(MAX_NUM_ROWS)
    inputs, uploads = StaticInputs(shapes, 60, cache), Uploads(cache.device, streams)
    rows = _random_decodes(random.Random(11), 4)
    batch = build_input_batch(make_step(rows), range(4), BLOCK_SIZE, cache.device)
    inputs.fill(batch.rows, shapes[-1], uploads)
    assert streams.num_copies == 1
    arrived = inputs.tensors(shapes[-1])
    assert arrived.input_ids.tolist() == [[*(row.tokens[0] for row in rows), 0, 0]]
    assert arrived.position_ids.tolist() == [[*(row.num_computed for row in rows), 0, 0]]
    assert arrived.paged.num_computed_tokens.tolist() == arrived.position_ids[0].tolist()
    assert arrived.paged.slot_mapping.tolist()[4:] == [-1, -1]
    for row, table in zip(rows, arrived.paged.block_tables.tolist(), strict=False):
        assert table[: len(row.block_table)] == row.block_table


class _CountedCopies(HostStreams):
    num_copies = 0

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        self.num_copies += 1
        super().copy_to_device(source, target)


class _Broken(RecordedOps):
    """Its second recording spoils the logits."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = super().record(run)
        return replay if self.num_recorded != 2 else partial(self._spoil, run)

    def _spoil(self, run: Callable[[], None]) -> None:
        graphs: Any = run
        graphs.func.__self__._outputs.logits.fill_(torch.nan)


class _Frozen(RecordedOps):
    """Replays nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        super().record(run)
        return lambda: None


@pytest.mark.parametrize("make_recorder", [_Frozen, _Broken])
def test_graphs_say_an_error_and_serve_without_when_a_replay_is_wrong(
    loaded: LoadedModel,
    make_recorder: Callable[[], RecordedOps],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = _cache(loaded)
    model = _recorded(static_model, make_recorder).make(loaded, cache)
    assert "cuda_graphs_refused" in caplog.text
    rows = _random_decodes(random.Random(9), 3)
    expected = _logits(_Turns(loaded, cache), rows)
    assert torch.equal(_logits(model, rows), expected)


def test_runner_samples_the_same_tokens_when_decodes_are_recorded(loaded: LoadedModel) -> None:
    outputs = []
    for make_model in (torch_model, _recorded(static_model, RecordedOps).make):
        config = CacheConfig(BLOCK_SIZE, num_device_blocks=60, num_host_blocks=0)
        runner = build_runner(loaded, config, make_model)
        sequences = [
            DrivenSequence([(7 * i + j) % 140 + 3 for j in range(3 + 4 * i)], 9, start_step=2 * i)
            for i in range(4)
        ]
        drive(runner, sequences, block_size=BLOCK_SIZE, num_blocks=60, chunk_size=5)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
