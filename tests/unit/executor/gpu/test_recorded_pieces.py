"""Steps with prompts in recorded pieces, against the decoder that launches all by itself."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.decoders.decoder import DecoderModel
from executor_service.device.cuda_graphs import CudaGraphs, Recorder
from executor_service.device.kv_cache import KVCache
from executor_service.errors import RecordingFailed
from executor_service.model.input_batch import InputBatch, build_input_batch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import PagedModel, torch_model
from executor_service.runner.decode_graphs import with_decode_graphs
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.steps.sampling_params import SamplingParams
from tests.support.devices.recorded_ops import TORCH_KERNELS, RecordedOps, RunAgain
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import DrivenSequence, Row, drive, make_step

pytest.importorskip("triton", reason="triton is not installed")

from executor_service.decoders import gpu_decoder
from executor_service.decoders.gpu_decoder import GpuDecoder
from executor_service.decoders.recorded_pieces import RecordedPieces, in_recorded_pieces
from splitserve_kernels import reference

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_TOKENS = 4, 24, 40
# Of float32 logits of about 10; a matrix product may depend on how many rows there are.
TOLERANCE = 1e-3
SCORED = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3, head norms": ("qwen3", {}),
    "llama, one layer": ("llama", {"num_hidden_layers": 1}),
}


@pytest.fixture(params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path, device: torch.device) -> LoadedModel:
    architecture, overrides = MODELS[request.param]
    make_tiny_model(architecture, tmp_path, seed=3, overrides=overrides)
    return load_model(ModelConfig(str(tmp_path), str(device), "float32", max_model_len=96))


@pytest.fixture(autouse=True)
def _operations_of_torch(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What is recorded on a CPU; a GPU records the kernels."""
    if device.type == "cpu":
        for name, in_torch in TORCH_KERNELS.items():
            monkeypatch.setattr(gpu_decoder, name, in_torch)


def _recorder() -> Recorder:
    return CudaGraphs() if torch.cuda.is_available() else RecordedOps()


def _cache(loaded: LoadedModel) -> KVCache:
    return KVCache(loaded.layers, BLOCK_SIZE, NUM_BLOCKS, 0, loaded.dtype, loaded.device)


def _random_rows(generator: random.Random, num_rows: int) -> list[Row]:
    free = list(range(NUM_BLOCKS))
    generator.shuffle(free)
    rows = []
    for _ in range(num_rows):
        computed, num_new = generator.randrange(9), generator.choice([1, 1, 2, 5, 11])
        tokens = [generator.randrange(3, 150) for _ in range(num_new)]
        table = [free.pop() for _ in range(-(-(computed + num_new) // BLOCK_SIZE))]
        rows.append(Row(tokens, computed, table, 30, generator.random() < 0.7, SCORED))
    return rows


@torch.inference_mode()
def _logits(loaded: LoadedModel, model: PagedModel, rows: list[Row]) -> Tensor:
    batch = build_input_batch(make_step(rows), range(len(rows)), BLOCK_SIZE, loaded.device)
    return model.logits(batch).clone()


@torch.inference_mode()
def test_pieces_say_what_the_decoder_says_when_rows_come_and_go(loaded: LoadedModel) -> None:
    decoder, recorder = GpuDecoder(loaded, reference), _recorder()
    caches = [_cache(loaded), _cache(loaded)]
    models = [DecoderModel(decoder, cache) for cache in caches]
    pieces = RecordedPieces(decoder, models[0], caches[0], MAX_NUM_TOKENS)
    assert pieces.record(recorder)
    for own, other in zip(
        caches[0].key_pools + caches[0].value_pools,
        caches[1].key_pools + caches[1].value_pools,
        strict=True,
    ):
        own.normal_()
        other.copy_(own)
    generator, num_replayed = random.Random(5), 0
    for num_rows in (3, 1, 4, 2, 3, 4):
        rows = _random_rows(generator, num_rows)
        # What was there before is nobody's, and neither are added tokens.
        for memory in (pieces._hidden, pieces._addend, pieces._query, pieces._attended):
            memory.fill_(torch.nan)
        expected = _logits(loaded, models[1], rows)
        torch.testing.assert_close(_logits(loaded, pieces, rows), expected, atol=TOLERANCE, rtol=0)
        num_tokens = sum(len(row.tokens) for row in rows)
        num_replayed += num_rows < num_tokens <= MAX_NUM_TOKENS
        for own, other in zip(caches[0].key_pools, caches[1].key_pools, strict=True):
            torch.testing.assert_close(own, other, atol=TOLERANCE, rtol=0)
    assert num_replayed > 2


def test_runner_samples_the_same_tokens_when_all_is_recorded(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = []
    for is_recorded in (False, True):
        if is_recorded:
            decoder = GpuDecoder(loaded, reference)
            make_model = in_recorded_pieces(decoder, MAX_NUM_TOKENS, _recorder)
            # Decodes by a recorder of kernels that wait: plain torch attends.
            make_model = with_decode_graphs(make_model, 2, RunAgain)
        else:
            make_model = torch_model
        config = CacheConfig(BLOCK_SIZE, num_device_blocks=60, num_host_blocks=0)
        runner = build_runner(loaded, config, make_model)
        sequences = [
            DrivenSequence([(7 * i + j) % 140 + 3 for j in range(3 + 9 * i)], 6, start_step=2 * i)
            for i in range(3)
        ]
        drive(runner, sequences, block_size=BLOCK_SIZE, num_blocks=60, chunk_size=7)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert not [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


class _Counting:
    """Counts what is not replayed."""

    def __init__(self, model: PagedModel) -> None:
        self._model, self.count = model, 0

    def logits(self, batch: InputBatch) -> Tensor:
        self.count += 1
        return self._model.logits(batch)


def test_pieces_are_for_prompts_of_so_many_tokens_only(loaded: LoadedModel) -> None:
    decoder, cache = GpuDecoder(loaded, reference), _cache(loaded)
    counting = _Counting(DecoderModel(decoder, cache))
    pieces = RecordedPieces(decoder, counting, cache, 16)
    assert pieces.record(_recorder())
    counting.count = 0
    for rows, is_replayed in (
        ([Row([7], 3, (0,), 3), Row([8], 3, (1,), 3)], False),
        ([Row(list(range(3, 20)), 0, range(5), 30)], False),
        ([Row(list(range(3, 19)), 0, range(5), 30)], True),
        ([Row([7], 3, (0,), 3), Row([8, 9], 3, (1, 2), 5)], True),
    ):
        before = counting.count
        _logits(loaded, pieces, rows)
        assert (counting.count == before) == is_replayed


class _Frozen(RecordedOps):
    """Replays nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        super().record(run)
        return lambda: None


@pytest.mark.parametrize(
    ("make_recorder", "event"),
    [
        (_Frozen, "prompt_graphs_refused"),
        (lambda: RecordedOps(fails=True), "prompt_graphs_failed"),
    ],
)
def test_decoder_serves_alone_when_pieces_are_wrong(
    loaded: LoadedModel,
    make_recorder: Callable[[], Recorder],
    event: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = GpuDecoder(loaded, reference)
    make = in_recorded_pieces(decoder, MAX_NUM_TOKENS, make_recorder)
    for _ in range(2):
        assert isinstance(make(loaded, _cache(loaded)), DecoderModel)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert event in errors[0]


class _BreaksOff(RecordedOps):
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RecordingFailed("capture was invalidated")


def test_no_model_is_made_when_a_recording_breaks_off(loaded: LoadedModel) -> None:
    make = in_recorded_pieces(GpuDecoder(loaded, reference), MAX_NUM_TOKENS, _BreaksOff)
    with pytest.raises(RecordingFailed):
        make(loaded, _cache(loaded))
