"""Recorded decodes against the model that was recorded, over steps whose rows change."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.kv_cache import KVCache
from executor_service.device.streams import HostStreams
from executor_service.device.uploads import Uploads
from executor_service.errors import RecordingFailed
from executor_service.model.input_batch import InputBatch, build_input_batch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import PagedModel, TransformersModel, torch_model
from executor_service.runner.decode_graphs import DecodeGraphs, recorded_sizes, with_decode_graphs
from executor_service.runner.decode_inputs import DecodeInputs
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.sampling.sampler import SamplingRows, draw_in_torch
from executor_service.steps.sampling_params import SamplingParams
from tests.support.devices.recorded_ops import RecordedOps, StaticAttention, mixed_model
from tests.support.devices.static_draw import SortingDraw
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import DrivenSequence, Row, drive, make_step

BLOCK_SIZE = 4
NUM_BLOCKS = 40
MAX_NUM_ROWS = 6
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


def _static_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
    return TransformersModel(loaded, cache, StaticAttention())


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

    graphs: DecodeGraphs
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
        return _static_model(self._loaded, self._cache).logits(batch)


@pytest.fixture
def pair(loaded: LoadedModel) -> Pair:
    caches = (_cache(loaded), _cache(loaded))
    recorder = RecordedOps()
    model = _static_model(loaded, caches[0])
    graphs = DecodeGraphs(model, loaded, caches[0], MAX_NUM_ROWS)
    graphs.record(recorder)
    assert recorder.num_recorded == len(recorded_sizes(MAX_NUM_ROWS))
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


@pytest.mark.parametrize("num_rows", recorded_sizes(MAX_NUM_ROWS))
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


def _drawing_runners(loaded: LoadedModel) -> tuple[ModelRunner, ModelRunner, _Refusing]:
    """One that draws in its recordings, one that never does, and what the first draws with else."""
    config = CacheConfig(BLOCK_SIZE, NUM_BLOCKS, num_host_blocks=0)
    recorded = with_decode_graphs(mixed_model, MAX_NUM_ROWS, RecordedOps, SortingDraw())
    draw = _Refusing()
    plain = with_decode_graphs(mixed_model, MAX_NUM_ROWS, RecordedOps)
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
    silent = replace(rows[0], samples=False)
    for number, changed in enumerate(
        (_asking(rows, (PENALIZED, *PLAIN)), _asking([silent, *rows[1:]], PLAIN)), start=1
    ):
        outputs = [runner.execute(make_step(changed)) for runner in (recorded, plain)]
        assert outputs[0].sampled_token_ids.tolist() == outputs[1].sampled_token_ids.tolist()
        assert draw.num_asked == number


class _DrawsLate(SortingDraw):
    """Draws something else each time that it is asked."""

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        return super().draw(logits, words) + self.num_drawn


def test_graphs_say_an_error_and_serve_without_when_they_draw_another_token(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    make = with_decode_graphs(_static_model, MAX_NUM_ROWS, RecordedOps, _DrawsLate())
    assert not isinstance(make(loaded, _cache(loaded)), DecodeGraphs)
    assert "draw another token" in caplog.text


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
    tables = pair.graphs._inputs.tensors(MAX_NUM_ROWS).paged.block_tables
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
    graphs = DecodeGraphs(counting, loaded, cache, 2)
    graphs._replays = {size: recorder.record(lambda: None) for size in recorded_sizes(2)}
    generator = random.Random(7)
    _logits(graphs, [Row([5, 6], 0, [0], 2), *_random_decodes(generator, 1)])
    _logits(graphs, _random_decodes(generator, 3))
    assert counting.count == 2
    assert recorder.num_replayed == 0


@pytest.mark.parametrize(
    ("make_model", "fails", "event"),
    [
        (_static_model, True, "decode_graphs_failed"),
        # It decides on the host how many keys a row has.
        (torch_model, False, "decode_graphs_refused"),
    ],
)
def test_graphs_say_an_error_and_serve_without_when_recording_fails(
    loaded: LoadedModel,
    make_model: type,
    fails: bool,
    event: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = _cache(loaded)
    recorder = RecordedOps(fails=fails)
    model = with_decode_graphs(make_model, MAX_NUM_ROWS, lambda: recorder)(loaded, cache)
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

    make = with_decode_graphs(_static_model, MAX_NUM_ROWS, make_recorder)
    for _ in range(2):
        make(loaded, _cache(loaded))
    assert len(recorders) == 1


class _BreaksOff(RecordedOps):
    """In the middle of a recording."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RecordingFailed("capture was invalidated")


def test_runner_is_not_made_when_a_recording_breaks_off(loaded: LoadedModel) -> None:
    make = with_decode_graphs(_static_model, MAX_NUM_ROWS, _BreaksOff)
    config = CacheConfig(BLOCK_SIZE, num_device_blocks=60, num_host_blocks=0)
    with pytest.raises(RecordingFailed):
        build_runner(loaded, config, make)
    measured = replace(config, num_device_blocks=None, max_num_rows=2, max_num_batched_tokens=8)
    measured = replace(measured, max_cpu_pool_bytes=None)
    with pytest.raises(RecordingFailed):
        build_runner(loaded, measured, make)


def test_inputs_of_a_step_arrive_in_one_copy_when_they_are_replayed(loaded: LoadedModel) -> None:
    cache, streams = _cache(loaded), _CountedCopies()
    inputs, uploads = DecodeInputs(MAX_NUM_ROWS, 60, cache), Uploads(cache.device, streams)
    rows = _random_decodes(random.Random(11), 4)
    batch = build_input_batch(make_step(rows), range(4), BLOCK_SIZE, cache.device)
    inputs.fill(batch.rows, 6, uploads)
    assert streams.num_copies == 1
    arrived = inputs.tensors(6)
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
        closure = run.__closure__ or ()
        for cell in closure:
            if isinstance(cell.cell_contents, DecodeGraphs):
                cell.cell_contents._logits.fill_(torch.nan)


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
    model = with_decode_graphs(_static_model, MAX_NUM_ROWS, make_recorder)(loaded, cache)
    assert "decode_graphs_refused" in caplog.text
    rows = _random_decodes(random.Random(9), 3)
    expected = _logits(_Turns(loaded, cache), rows)
    assert torch.equal(_logits(model, rows), expected)


def test_runner_samples_the_same_tokens_when_decodes_are_recorded(loaded: LoadedModel) -> None:
    outputs = []
    for make_model in (torch_model, with_decode_graphs(mixed_model, 4, RecordedOps)):
        config = CacheConfig(BLOCK_SIZE, num_device_blocks=60, num_host_blocks=0)
        runner = build_runner(loaded, config, make_model)
        sequences = [
            DrivenSequence([(7 * i + j) % 140 + 3 for j in range(3 + 4 * i)], 9, start_step=2 * i)
            for i in range(4)
        ]
        drive(runner, sequences, block_size=BLOCK_SIZE, num_blocks=60, chunk_size=5)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("max_num_rows", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (330, [1, 2, 4, *range(8, 257, 8), 320, 330]),
    ],
)
def test_recorded_sizes_end_with_the_most_rows(max_num_rows: int, expected: list[int]) -> None:
    assert recorded_sizes(max_num_rows) == expected
