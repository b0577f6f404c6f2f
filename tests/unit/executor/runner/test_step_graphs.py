"""Recorded steps against the model that was recorded, over steps whose rows change."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from executor_service.device.kv_cache import KVCache
from executor_service.device.streams import HostStreams
from executor_service.device.uploads import Uploads
from executor_service.model.input_batch import InputBatch, build_input_batch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import PagedModel, torch_model
from executor_service.runner.static_inputs import StaticInputs, decode_shapes
from executor_service.runner.step_graphs import StepGraphs
from executor_service.steps.sampling_params import SamplingParams
from tests.support.devices.recorded_ops import RecordedOps, static_model
from tests.support.steps.step_driver import Row, make_step
from tests.unit.executor.runner.recorded_steps import (
    BLOCK_SIZE,
    MAX_NUM_ROWS,
    SHAPES,
    TABLE_WIDTH,
    TOLERANCE,
    Turns,
    cache_of,
    logits_of,
    random_decodes,
    random_mixture,
)


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


@pytest.fixture
def pair(loaded: LoadedModel) -> Pair:
    caches = (cache_of(loaded), cache_of(loaded))
    recorder = RecordedOps()
    model = static_model(loaded, caches[0])
    graphs = StepGraphs(model, loaded, caches[0], SHAPES)
    assert not graphs.record(recorder)
    assert recorder.num_recorded == len(SHAPES)
    made = Pair(graphs, recorder, Turns(loaded, caches[1]), caches)
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
        rows = random_decodes(generator, num_rows)
        expected = logits_of(pair.original, rows)
        torch.testing.assert_close(logits_of(pair.graphs, rows), expected, atol=TOLERANCE, rtol=0)
        _assert_same_pools(pair)
    assert pair.recorder.num_replayed == 9


@pytest.mark.parametrize("num_rows", [shape.num_tokens for shape in decode_shapes(MAX_NUM_ROWS)])
def test_graphs_say_the_same_bits_when_no_row_is_added(pair: Pair, num_rows: int) -> None:
    generator = random.Random(2)
    for _ in range(3):
        rows = [
            # As wide as the buffers: how many numbers are summed decides how they are rounded.
            replace(row, block_table=[*row.block_table, *[0] * TABLE_WIDTH][:TABLE_WIDTH])
            for row in random_decodes(generator, num_rows)
        ]
        assert torch.equal(logits_of(pair.graphs, rows), logits_of(pair.original, rows))


def test_graphs_say_what_the_model_says_when_prompts_come_beside_decodes(pair: Pair) -> None:
    generator = random.Random(12)
    mixtures = [(0, [2]), (3, [5]), (0, [16]), (1, [2, 3]), (4, [12, 4]), (0, [9, 2, 7]), (5, [3])]
    for number, (num_decodes, lengths) in enumerate(mixtures, start=1):
        rows = random_mixture(generator, num_decodes, lengths)
        expected = logits_of(pair.original, rows)
        torch.testing.assert_close(logits_of(pair.graphs, rows), expected, atol=TOLERANCE, rtol=0)
        _assert_same_pools(pair)
        assert pair.recorder.num_replayed == number


def test_steps_are_not_replayed_when_they_ask_for_more_lines_or_tokens_than_there_are(
    pair: Pair,
) -> None:
    generator = random.Random(13)
    scored = SamplingParams(num_prompt_logprobs=0)
    (prompt,) = random_mixture(generator, 0, [8])
    many = [replace(prompt, params=scored)]
    for rows in (many, random_mixture(generator, 1, [20])):
        expected = logits_of(pair.original, rows)
        torch.testing.assert_close(logits_of(pair.graphs, rows), expected, atol=TOLERANCE, rtol=0)
    assert pair.recorder.num_replayed == 0


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


def test_graphs_pick_the_rows_that_sample_when_some_do_not(pair: Pair) -> None:
    generator = random.Random(4)
    for num_rows in (3, 6, 5):
        rows = random_decodes(generator, num_rows, samples=False)
        expected = logits_of(pair.original, rows)
        assert len(expected) == sum(row.samples for row in rows)
        torch.testing.assert_close(logits_of(pair.graphs, rows), expected, atol=TOLERANCE, rtol=0)


def test_graphs_score_prompts_when_a_chunk_has_one_token(pair: Pair) -> None:
    rows = random_decodes(random.Random(5), 3)
    params = SamplingParams(num_prompt_logprobs=0)
    chunk = Row([9], 2, [30, 31], 8, False, params)
    expected = logits_of(pair.original, [*rows, chunk])
    actual = logits_of(pair.graphs, [*rows, chunk])
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    assert pair.recorder.num_replayed == 1


def test_graphs_read_block_0_when_an_added_row_follows_a_row_without_a_first_block(
    pair: Pair,
) -> None:
    """Behind a sliding window entries are -1."""
    tables = pair.graphs._inputs.tensors(decode_shapes(MAX_NUM_ROWS)[-1]).paged.block_tables
    tables.fill_(-1)
    logits_of(pair.graphs, random_decodes(random.Random(6), 3))
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


def test_inputs_of_a_step_arrive_in_one_copy_when_they_are_replayed(loaded: LoadedModel) -> None:
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
