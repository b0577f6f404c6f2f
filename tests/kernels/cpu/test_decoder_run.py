"""Rows that a native decoder has run on: the bits of turns, tokens and pools."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_service.backends import native_draw
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import NativeModel, NativePagedModel
from executor_service.device import KVCache
from executor_service.model import Adapter, InputBatch, LoadedModel, PagedModel
from executor_service.runner import ModelRunner
from executor_service.steps import (
    RowStatus,
    SamplingParams,
    StepInput,
    StepOutput,
    TokenRuns,
    run_on,
)
from splitserve_kernels.cpu import STEP_PARTS, NativeLibrary
from splitserve_kernels.decoder_inputs import RunRows
from tests.kernels.cpu.tiny_decoders import DirectoryOf, load_decoder, random_tokens
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.support.steps.step_driver import GREEDY, Row, make_step

pytestmark = pytest.mark.cases(8)

NUM_BLOCKS = 450
_SETTINGS = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
KINDS = [
    ("llama_odd_vocabulary", torch.float32, False),
    ("qwen3", torch.bfloat16, False),
    ("mistral", torch.bfloat16, False),
    ("llama_odd_mlp", torch.bfloat16, True),
]


class _Counted:
    """Counts what it is asked for."""

    def __init__(self, model: NativePagedModel) -> None:
        self._model = model
        self.num_runs = 0
        self.num_passes = 0

    def logits(self, batch: InputBatch) -> torch.Tensor:
        self.num_passes += 1
        return self._model.logits(batch)

    @property
    def can_run(self) -> bool:
        return self._model.can_run

    def can_run_adapted(self, adapters: Collection[Adapter]) -> bool:
        return self._model.can_run_adapted(adapters)

    def decode_run(self, batch: InputBatch, rows: RunRows) -> torch.Tensor:
        self.num_runs += 1
        return self._model.decode_run(batch, rows)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A native decoder without pools."""

    native: NativeModel
    loaded: LoadedModel
    library: NativeLibrary

    def runner(self, block_size: int) -> tuple[ModelRunner, _Counted]:
        """Over pools of its own, which hold some numbers."""
        loaded = self.loaded
        cache = KVCache(loaded.layers, block_size, NUM_BLOCKS, 0, loaded.dtype, loaded.device)
        generator = torch.Generator().manual_seed(3)
        for pool in (*cache.key_pools, *cache.value_pools):
            pool.normal_(generator=generator)
        model = _Counted(NativePagedModel(self.native, cache))
        return ModelRunner(loaded, cache, model, native_draw(self.library)), model


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0])
def decoder(
    request: pytest.FixtureRequest, library: NativeLibrary, directory_of: DirectoryOf
) -> Decoder:
    name, dtype, is_int8 = request.param
    loaded = load_decoder(directory_of(name, dtype))
    return Decoder(NativeModel(loaded, library, is_int8=is_int8), loaded, library)


def _by_turns(runner: ModelRunner, step: StepInput) -> StepOutput:
    return run_on(step, runner.execute)


def _tokens(output: StepOutput) -> list[list[int]]:
    return [output.token_ids_of(row) for row in range(len(output.row_statuses))]


def _pools(runner: ModelRunner) -> list[torch.Tensor]:
    """As whole numbers, by which NaN equals itself."""
    cache = runner.cache
    return [pool.view(torch.uint8) for pool in (*cache.key_pools, *cache.value_pools)]


def _assert_equal(decoder: Decoder, step: StepInput, block_size: int) -> list[list[int]]:
    """In one go as by turns; returns the tokens."""
    in_one_go, counted = decoder.runner(block_size)
    by_turns, others = decoder.runner(block_size)
    output = in_one_go.execute(step)
    expected = _by_turns(by_turns, step)
    # A row that ended before logits that are no numbers is asked for again, to be sure of it.
    assert counted.num_runs == 1 or RowStatus.INVALID_LOGITS in output.row_statuses
    assert (counted.num_passes, others.num_runs) == (0, 0)
    assert _tokens(output) == _tokens(expected)
    assert output.row_statuses.tolist() == expected.row_statuses.tolist()
    assert output.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
    assert all(map(torch.equal, _pools(in_one_go), _pools(by_turns)))
    return _tokens(output)


@functools.cache
def _shuffled() -> list[int]:
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))
    return [int(block) for block in order]


def _step(rows: Sequence[tuple[int, int, SamplingParams]], block_size: int) -> StepInput:
    """Of each row: tokens that are there, tokens it may get, how they are drawn."""
    blocks = iter(_shuffled())
    made = [
        Row(
            random_tokens(1, seed=num_computed),
            num_computed,
            [next(blocks) for _ in range(-(-(num_computed + num_tokens) // block_size))],
            num_prompt_tokens=1,
            params=params,
            seed=7 * index,
        )
        for index, (num_computed, num_tokens, params) in enumerate(rows)
    ]
    num_run_on = np.array([num_tokens - 1 for _, num_tokens, _ in rows], np.int32)
    return replace(make_step(made), num_run_on_tokens=num_run_on)


_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([None, 1, 20]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset(range(0, VOCAB_SIZE, 9))]),
)


@pytest.mark.cases(4)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 9), _params), min_size=1, max_size=6
    ),
    block_size=st.sampled_from([1, 4, 16]),
    num_threads=st.sampled_from([1, 2, 3]),
)
@_SETTINGS
@pytest.mark.usefixtures("num_threads")
def test_tokens_and_pools_are_those_of_turns_when_rows_run_on(
    decoder: Decoder,
    rows: list[tuple[int, int, SamplingParams]],
    block_size: int,
    num_threads: int,
) -> None:
    torch.set_num_threads(num_threads)
    _assert_equal(decoder, _step(rows, block_size), block_size)


@pytest.mark.cases(2)
@pytest.mark.usefixtures("num_threads")
def test_tokens_are_those_of_turns_when_long_rows_share_blocks(
    library: NativeLibrary, tmp_path: Path
) -> None:
    """Attention cuts a context of 2048 tokens into partitions, and reads shared blocks once."""
    torch.set_num_threads(2)
    decoder = _long_decoder(library, tmp_path)
    step = _step([(2044, 9, GREEDY), (2045, 9, GREEDY), (300, 3, GREEDY)], 16)
    tables = step.block_tables.copy()
    tables[1, :60] = tables[0, :60]
    _assert_equal(decoder, replace(step, block_tables=tables), 16)


def test_rotation_table_grows_when_a_run_passes_its_end(
    library: NativeLibrary, tmp_path: Path
) -> None:
    _assert_equal(_long_decoder(library, tmp_path), _step([(4090, 12, GREEDY)], 16), 16)


def _long_decoder(library: NativeLibrary, directory: Path) -> Decoder:
    """Of a model for sequences of 8192 tokens."""
    make_tiny_model("llama", directory, overrides={"max_position_embeddings": 8192})
    loaded = load_model(ModelConfig(str(directory)))
    return Decoder(NativeModel(loaded, library), loaded, library)


def test_row_ends_before_logits_that_are_nan(
    library: NativeLibrary, directory_of: DirectoryOf
) -> None:
    loaded = load_decoder(directory_of("llama"))
    step = _step([(20, 6, GREEDY), (31, 6, GREEDY), (5, 6, GREEDY)], 4)
    sound = Decoder(NativeModel(load_decoder(directory_of("llama")), library), loaded, library)
    tokens = _assert_equal(sound, step, 4)
    bad_tokens = [tokens[0][2], int(step.token_ids[2])]
    embedding = loaded.model.get_input_embeddings().weight.data  # type: ignore[operator]
    embedding[bad_tokens] = torch.nan
    decoder = Decoder(NativeModel(loaded, library), loaded, library)
    found = _assert_equal(decoder, step, 4)
    end = min(tokens[0].index(token) for token in bad_tokens if token in tokens[0])
    assert found[0] == tokens[0][: end + 1]
    assert found[2] == []
    output = decoder.runner(4)[0].execute(step)
    assert output.row_statuses.tolist() == [RowStatus.OK, RowStatus.OK, RowStatus.INVALID_LOGITS]


def test_run_measures_each_of_its_parts_when_asked(
    library: NativeLibrary, directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_ns = torch.zeros(len(STEP_PARTS), dtype=torch.int64)
    monkeypatch.setattr(library, "part_ns", part_ns)
    loaded = load_decoder(directory_of("llama"))
    decoder = Decoder(NativeModel(loaded, library), loaded, library)
    started_ns = time.perf_counter_ns()
    decoder.runner(4)[0].execute(_step([(20, 6, GREEDY)], 4))
    assert bool((part_ns > 0).all())
    assert int(part_ns.sum()) < time.perf_counter_ns() - started_ns


def test_model_is_none_that_runs_on_when_it_only_computes_logits(
    library: NativeLibrary, directory_of: DirectoryOf
) -> None:
    """Turns are the oracle: without a model that runs on, a runner takes them."""
    loaded = load_decoder(directory_of("llama"))
    decoder = Decoder(NativeModel(loaded, library), loaded, library)
    runner, counted = decoder.runner(4)

    class OnlyLogits:
        def logits(self, batch: InputBatch) -> torch.Tensor:
            return counted.logits(batch)

    model: PagedModel = OnlyLogits()
    stepwise = ModelRunner(loaded, runner.cache, model, native_draw(library))
    stepwise.execute(_step([(3, 4, GREEDY)], 4))
    assert (counted.num_runs, counted.num_passes) == (0, 4)


@pytest.mark.parametrize("num_told", [1, 3])
@pytest.mark.usefixtures("num_threads")
def test_run_ends_after_the_token_at_which_it_is_told(
    library: NativeLibrary, directory_of: DirectoryOf, num_told: int
) -> None:
    torch.set_num_threads(2)
    loaded = load_decoder(directory_of("llama"))
    decoder = Decoder(NativeModel(loaded, library), loaded, library)
    step = _step([(20, 6, GREEDY), (31, 2, GREEDY), (5, 6, GREEDY)], 4)
    expected = _tokens(decoder.runner(4)[0].execute(step))
    seen: list[list[list[int]]] = []

    def watch(runs: TokenRuns) -> bool:
        seen.append(runs.rows)
        return len(seen) < num_told

    runner, counted = decoder.runner(4)
    tokens = _tokens(runner.execute(replace(step, watch=watch)))
    assert tokens == [row[:num_told] for row in expected]
    assert seen == [[row[:n] for row in expected] for n in range(1, num_told + 1)]
    assert (counted.num_runs, counted.num_passes) == (1, 0)


def test_run_is_the_same_when_it_is_watched_to_its_end(
    library: NativeLibrary, directory_of: DirectoryOf
) -> None:
    loaded = load_decoder(directory_of("llama"))
    decoder = Decoder(NativeModel(loaded, library), loaded, library)
    step = _step([(20, 6, GREEDY), (31, 4, GREEDY)], 4)
    seen: list[list[int]] = []

    def watch(runs: TokenRuns) -> bool:
        seen.append(runs.counts.tolist())
        return True

    watched, plain = decoder.runner(4)[0], decoder.runner(4)[0]
    assert _tokens(watched.execute(replace(step, watch=watch))) == _tokens(plain.execute(step))
    assert all(map(torch.equal, _pools(watched), _pools(plain)))
    # Nobody is asked after the last token.
    assert seen == [[n, min(n, 4)] for n in range(1, 6)]
