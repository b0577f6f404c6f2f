"""Recorded steps against the model that was recorded; what serves where a recording fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.device import HostStreams, KVCache, Uploads
from executor_service.errors import RecordingFailed
from executor_service.model import (
    Adapter,
    InputBatch,
    LoadedModel,
    MakeModel,
    PagedModel,
    build_input_batch,
    torch_model,
)
from executor_service.runner import (
    CacheConfig,
    StaticInputs,
    StepGraphs,
    build_runner,
    decode_shapes,
    prompt_shapes,
)
from executor_service.steps import SamplingParams
from splitserve_kernels.low_rank_update import LowRankUpdate
from tests.support.devices.recorded_ops import RecordedOps, static_model
from tests.support.models.tiny_models import load_tiny_model
from tests.support.steps.step_driver import Row, make_step
from tests.unit.executor.runner.recorded_steps import (
    BLOCK_SIZE,
    MAX_NUM_ROWS,
    MAX_NUM_TOKENS,
    SHAPES,
    TABLE_WIDTH,
    TOLERANCE,
    Turns,
    cache_of,
    logits_of,
    random_decodes,
    random_mixture,
    recorded_models,
)


@dataclass(slots=True)
class Pair:
    """A recorded model and its original, each on pools of its own with the same content."""

    graphs: StepGraphs
    recorder: RecordedOps
    original: PagedModel
    caches: tuple[KVCache, KVCache] = field(repr=False)

    def assert_same(self, rows: list[Row], *, is_replayed: bool = True) -> None:
        """Both return the same logits, and write the same to their pools.

        A step that is not replayed has the attention of the original, on whose pools it works.
        """
        expected = logits_of(self.original, rows)
        torch.testing.assert_close(logits_of(self.graphs, rows), expected, atol=TOLERANCE, rtol=0)
        for a, b in zip(*map(_pools, self.caches), strict=True) if is_replayed else ():
            torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


def _pools(cache: KVCache) -> list[Tensor]:
    return [*cache.key_pools, *cache.value_pools]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp(request.param)
    return load_tiny_model(request.param, directory, max_model_len=TABLE_WIDTH * BLOCK_SIZE)


@pytest.fixture
def pair(loaded: LoadedModel) -> Pair:
    caches = (cache_of(loaded), cache_of(loaded))
    recorder = RecordedOps()
    graphs = StepGraphs(static_model(loaded, caches[0]), loaded, caches[0], SHAPES)
    assert not graphs.record(recorder)
    assert recorder.num_recorded == len(SHAPES)
    recorder.num_replayed = 0
    generator = torch.Generator().manual_seed(0)
    for first, second in zip(*map(_pools, caches), strict=True):
        second.copy_(first.normal_(generator=generator))
    return Pair(graphs, recorder, Turns(loaded, caches[1]), caches)


def test_graphs_compute_what_the_model_does_when_rows_come_and_go(pair: Pair) -> None:
    generator = random.Random(1)
    for num_rows in (6, 1, 3, 5, 2, 6, 4, 3, 1):
        pair.assert_same(random_decodes(generator, num_rows))
    assert pair.recorder.num_replayed == 9


def test_graphs_compute_what_the_model_does_when_prompts_come(pair: Pair) -> None:
    generator = random.Random(12)
    mixtures = [(0, [2]), (3, [5]), (0, [16]), (1, [2, 3]), (4, [12, 4]), (0, [9, 2, 7]), (5, [3])]
    for number, (num_decodes, lengths) in enumerate(mixtures, start=1):
        pair.assert_same(random_mixture(generator, num_decodes, lengths))
        assert pair.recorder.num_replayed == number


def test_graphs_are_not_replayed_when_a_step_is_too_large(pair: Pair) -> None:
    generator = random.Random(13)
    (prompt,) = random_mixture(generator, 0, [8])
    # More lines, and more tokens, than there are.
    scored = replace(prompt, params=SamplingParams(num_prompt_logprobs=0))
    for rows in ([scored], random_mixture(generator, 1, [20])):
        pair.assert_same(rows, is_replayed=False)
    assert pair.recorder.num_replayed == 0


def test_graphs_pick_the_rows_that_sample_when_some_do_not(pair: Pair) -> None:
    generator = random.Random(4)
    for num_rows in (3, 6, 5):
        rows = random_decodes(generator, num_rows, samples=False)
        pair.assert_same(rows)
        assert len(logits_of(pair.graphs, rows)) == sum(row.samples for row in rows)


def test_graphs_score_prompts_when_a_chunk_has_one_token(pair: Pair) -> None:
    rows = random_decodes(random.Random(5), 3)
    pair.assert_same(
        [*rows, Row([9], 2, [30, 31], 8, False, SamplingParams(num_prompt_logprobs=0))]
    )
    assert pair.recorder.num_replayed == 1


@pytest.mark.parametrize("num_rows", [shape.num_tokens for shape in decode_shapes(MAX_NUM_ROWS)])
def test_graphs_compute_the_same_bits_when_no_row_is_added(pair: Pair, num_rows: int) -> None:
    generator = random.Random(2)
    for _ in range(3):
        rows = [
            # As wide as the buffers: how many numbers are summed decides how they are rounded.
            replace(row, block_table=[*row.block_table, *[0] * TABLE_WIDTH][:TABLE_WIDTH])
            for row in random_decodes(generator, num_rows)
        ]
        assert torch.equal(logits_of(pair.graphs, rows), logits_of(pair.original, rows))


def test_graphs_leave_the_pools_alone_when_rows_are_added(pair: Pair) -> None:
    before = [pool.clone() for pool in pair.caches[0].key_pools]
    (row,) = random_decodes(random.Random(3), 1)
    logits_of(pair.graphs, [row])
    rows = random_decodes(random.Random(3), 5)
    logits_of(pair.graphs, rows)
    written = {
        row.block_table[row.num_computed // BLOCK_SIZE] * BLOCK_SIZE + row.num_computed % BLOCK_SIZE
        for row in [*rows, row]
    }
    for pool, old in zip(pair.caches[0].key_pools, before, strict=True):
        changed = (pool != old).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert set(changed) <= written


def test_graphs_read_block_0_when_a_row_is_added(
    pair: Pair,
) -> None:
    """Behind a sliding window entries are -1."""
    tables = pair.graphs._inputs.tensors(decode_shapes(MAX_NUM_ROWS)[-1]).paged.block_tables
    tables.fill_(-1)
    logits_of(pair.graphs, random_decodes(random.Random(6), 3))
    assert tables[3].tolist()[0] == 0


def test_graphs_are_not_replayed_when_a_row_has_an_adapter(
    pair: Pair, loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.0.mlp.up_proj"
    target = loaded.adapter_targets[name]
    update = LowRankUpdate(torch.ones(1, target.num_inputs), torch.ones(target.num_outputs, 1), 0.1)
    adapters = {"a@1": Adapter("a@1", {name: update})}
    plain = random_decodes(random.Random(8), 3)
    expected = logits_of(pair.graphs, plain)
    assert pair.recorder.num_replayed == 1

    for _ in range(2):
        rows = [replace(row, adapter="a@1" * (index == 1)) for index, row in enumerate(plain)]
        step = make_step(rows)
        cpu = torch.device("cpu")
        batch = build_input_batch(step, [0, 1, 2], BLOCK_SIZE, cpu, adapters=adapters)
        with torch.inference_mode():
            logits = pair.graphs.logits(batch)

    assert pair.recorder.num_replayed == 1
    assert pair.graphs.takes_adapters
    torch.testing.assert_close(logits[::2], expected[::2], atol=TOLERANCE, rtol=0)
    assert not torch.allclose(logits[1], expected[1], atol=100 * TOLERANCE)
    assert [record.message.split()[0] for record in caplog.records].count(
        "adapters_unrecorded"
    ) == 1


class _Counting:
    """Counts what is not replayed."""

    def __init__(self, model: PagedModel) -> None:
        self._model, self.count = model, 0

    def logits(self, batch: InputBatch) -> Tensor:
        self.count += 1
        return self._model.logits(batch)


def test_graphs_are_not_used_when_no_shape_fits(
    loaded: LoadedModel,
) -> None:
    cache, recorder = cache_of(loaded), RecordedOps()
    counting = _Counting(torch_model(loaded, cache))
    shapes = decode_shapes(2)
    graphs = StepGraphs(counting, loaded, cache, shapes)
    graphs._replays = {shape: recorder.record(lambda: None) for shape in shapes}
    generator = random.Random(7)
    logits_of(graphs, [Row([5, 6], 0, [0], 2), *random_decodes(generator, 1)])
    logits_of(graphs, random_decodes(generator, 3))
    assert counting.count == 2
    assert recorder.num_replayed == 0


def test_inputs_of_a_replayed_step_arrive_in_one_copy(loaded: LoadedModel) -> None:
    cache, streams = cache_of(loaded), _CountedCopies()
    shapes = decode_shapes(MAX_NUM_ROWS)
    inputs, uploads = StaticInputs(shapes, 60, cache), Uploads(cache.device, streams)
    rows = random_decodes(random.Random(11), 4)
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
    cache = cache_of(loaded)
    recorder = RecordedOps(fails=fails)
    model = recorded_models(make_model, lambda: recorder).make(loaded, cache)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert event in errors[0]
    num_tried = recorder.num_replayed
    assert logits_of(model, random_decodes(random.Random(8), 3)).isfinite().all()
    assert recorder.num_replayed == num_tried


def test_graphs_are_not_tried_again_when_they_could_not_be_recorded(loaded: LoadedModel) -> None:
    recorders: list[RecordedOps] = []

    def make_recorder() -> RecordedOps:
        recorders.append(RecordedOps(fails=True))
        return recorders[-1]

    make = recorded_models(static_model, make_recorder).make
    for _ in range(2):
        make(loaded, cache_of(loaded))
    assert len(recorders) == 1


def test_steps_are_launched_when_recordings_are_left_out(loaded: LoadedModel) -> None:
    """So that what is launched for steps that are not recorded can be compiled before serving."""
    recorder = RecordedOps()
    recorded = recorded_models(static_model, lambda: recorder, None, MAX_NUM_TOKENS)
    model = recorded.make(loaded, cache_of(loaded))
    assert recorded.recorded is not None
    assert recorded.recorded.num_graphs == len(SHAPES)
    rows = [*random_decodes(random.Random(14), 2), Row([5, 6, 7], 0, (38,), 3)]
    counts = [recorder.num_replayed]
    with recorded.left_out():
        logits_of(model, rows)
        counts.append(recorder.num_replayed)
    logits_of(model, rows)
    counts.append(recorder.num_replayed)
    assert (counts[1] - counts[0], counts[2] - counts[1]) == (0, 1)


def test_the_largest_of_each_kind_is_recorded_when_memory_is_measured(loaded: LoadedModel) -> None:
    recorders = [RecordedOps(), RecordedOps()]
    recorded = recorded_models(static_model, iter(recorders).__next__, None, MAX_NUM_TOKENS)
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
    make = recorded_models(static_model, _BreaksOff).make
    config = CacheConfig(BLOCK_SIZE, num_device_blocks=60, num_host_blocks=0)
    with pytest.raises(RecordingFailed):
        build_runner(loaded, config, make)
    measured = replace(config, num_device_blocks=None, max_num_rows=2, max_num_batched_tokens=8)
    measured = replace(measured, max_cpu_pool_bytes=None)
    with pytest.raises(RecordingFailed):
        build_runner(loaded, measured, make)


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
def test_graphs_are_not_used_when_a_replay_is_wrong(
    loaded: LoadedModel,
    make_recorder: Callable[[], RecordedOps],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = cache_of(loaded)
    model = recorded_models(static_model, make_recorder).make(loaded, cache)
    assert "cuda_graphs_refused" in caplog.text
    rows = random_decodes(random.Random(9), 3)
    expected = logits_of(Turns(loaded, cache), rows)
    assert torch.equal(logits_of(model, rows), expected)


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
def test_shapes_of_decodes_end_with_the_most_rows(max_num_rows: int, expected: list[int]) -> None:
    shapes = decode_shapes(max_num_rows)
    assert [shape.num_tokens for shape in shapes] == expected
    assert {(s.num_decodes - s.num_tokens, s.num_prompts) for s in shapes} == {(0, 0)}


@pytest.mark.parametrize(
    ("max_num_tokens", "expected"),
    [
        (0, []),
        (1, []),
        (2, [2]),
        (16, [16]),
        (40, [16, 32, 40]),
        (8192, [16, *range(32, 257, 32), *range(320, 1025, 64)]),
    ],
)
def test_shapes_of_prompts_end_with_the_most_tokens_and_are_few(
    max_num_tokens: int, expected: list[int]
) -> None:
    shapes = prompt_shapes(256, max_num_tokens)
    assert [shape.num_tokens for shape in shapes] == expected
    assert len(shapes) <= 21


@pytest.mark.parametrize("max_num_rows", [1, 2, 5, 256, 1024])
def test_shapes_of_prompts_have_room_for_any_step_of_few_prompts(max_num_rows: int) -> None:
    for shape in prompt_shapes(max_num_rows, 2048):
        # A prompt has two tokens at least.
        most_prompts = min(shape.num_tokens // 2, max_num_rows, 32)
        assert shape.num_prompts == most_prompts
        assert shape.num_decodes == min(shape.num_tokens, max_num_rows)
        assert shape.num_lines == min(shape.num_tokens, max_num_rows)
