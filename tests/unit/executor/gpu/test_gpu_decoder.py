"""The decoder for GPUs, through the runner, against what Hugging Face generates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import rotation
from executor_service.device import CudaGraphs, KVCache, LayerShape, Recorder
from executor_service.errors import TrialFailed
from executor_service.model import (
    LayerKind,
    LoadedModel,
    MakeModel,
    TransformersModel,
    build_input_batch,
)
from executor_service.runner import CacheConfig, RecordedModels, build_runner
from executor_service.trials import try_layer, try_rotary_write
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import (
    UNIT_SCALES,
    AttentionBackend,
    AttentionOptions,
    KVScales,
    PagedBatch,
)
from tests.support.devices.recorded_ops import TORCH_KERNELS, RecordedOps, RunAgain, StaticAttention
from tests.support.models.model_pair import generate_greedily, load_reference, served_logits
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import DrivenSequence, Row, drive, make_step

pytest.importorskip("triton", reason="triton is not installed")

from executor_service.decoders import gpu_decoder
from executor_service.decoders.gpu_decoder import GpuDecoder, GpuDecoderModel, build_gpu_decoder
from splitserve_kernels.gpu.attention import backend
from splitserve_kernels.gpu.kv_write import rotary_kv_write

pytestmark = pytest.mark.cases(2)

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 60, 96
NUM_OUTPUT_TOKENS = 3
PROMPT = [(11 * i + 5) % 90 for i in range(37)]
# Of float32 logits of about 10: sums in another order.
TOLERANCE = 1e-3
ODD: Mapping[str, Any] = {
    "hidden_size": 42,
    "intermediate_size": 97,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "tie_word_embeddings": True,
    "vocab_size": 131,
}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# What only one layer has to show; "llama" has two, each with pools of its own.
ONE_LAYER: Mapping[str, Any] = {"num_hidden_layers": 1}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, odd and tied": ("llama", {**ONE_LAYER, **ODD}),
    "llama, biases": ("llama", {**ONE_LAYER, "attention_bias": True, "mlp_bias": True}),
    "mistral, window": ("mistral", ONE_LAYER),
    "qwen2, biases of some": ("qwen2", ONE_LAYER),
    "qwen3, head norms": ("qwen3", ONE_LAYER),
    "llama, scaled angles": ("llama", {**ONE_LAYER, "rope_parameters": YARN}),
}


@dataclass(frozen=True, slots=True)
class Case:
    directory: Path
    reference: Any
    device: torch.device

    def load(self, dtype: str = "float32") -> LoadedModel:
        config = ModelConfig(str(self.directory), str(self.device), dtype)
        return load_model(replace(config, max_model_len=MAX_MODEL_LEN))


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Case:
    architecture, overrides = MODELS[request.param]
    directory = tmp_path_factory.mktemp(architecture)
    make_tiny_model(architecture, directory, seed=3, overrides=overrides)
    return Case(directory, load_reference(directory), device)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Case:
    directory = tmp_path_factory.mktemp("one")
    make_tiny_model("llama", directory, seed=3, overrides=ONE_LAYER)
    return Case(directory, None, device)


@pytest.fixture
def _without_kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """For what the kernels do not matter to: interpreted, they take long."""
    if device.type == "cpu":
        for name, in_torch in TORCH_KERNELS.items():
            monkeypatch.setattr(gpu_decoder, name, in_torch)


def _making(decoder: GpuDecoder) -> MakeModel:
    return lambda _loaded, cache: GpuDecoderModel(decoder, cache)


def _config() -> CacheConfig:
    return CacheConfig(BLOCK_SIZE, num_device_blocks=NUM_BLOCKS, num_host_blocks=0)


def _prompts(case: Case) -> list[list[int]]:
    vocab_size = case.reference.config.vocab_size
    return [[(7 * i + 3 * j) % (vocab_size - 3) + 3 for j in range(5 + 14 * i)] for i in range(2)]


def _make_recorder() -> Recorder:
    return CudaGraphs() if torch.cuda.is_available() else RunAgain()


def test_runner_samples_what_hugging_face_generates_when_our_decoder_computes(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = case.load()
    make_model = _making(GpuDecoder(loaded, backend))
    recorded = RecordedModels(make_model, 2, 10, make_recorder=_make_recorder)
    runner = build_runner(loaded, _config(), recorded.make)
    sequences = [
        DrivenSequence(prompt, NUM_OUTPUT_TOKENS, start_step=2 * i)
        for i, prompt in enumerate(_prompts(case))
    ]
    drive(runner, sequences, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_size=9)
    for sequence in sequences:
        expected = generate_greedily(case.reference, sequence.prompt, NUM_OUTPUT_TOKENS)
        assert sequence.output == expected
    refusals = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert not refusals


def test_runner_reads_a_prefix_that_another_row_writes(case: Case) -> None:
    loaded = case.load()
    runner = build_runner(loaded, _config(), _making(GpuDecoder(loaded, reference)))
    first = _prompts(case)[1]
    second = [*first[: 3 * BLOCK_SIZE], 9, 8, 7]
    rows = [
        Row(first, 0, range(10, 22), len(first)),
        Row(second[12:], 12, (10, 11, 12, 5), len(second)),
    ]
    tokens = runner.execute(make_step(rows)).sampled_token_ids.tolist()
    assert tokens == [generate_greedily(case.reference, p, 1)[0] for p in (first, second)]


def _logits(loaded: LoadedModel, make_model: MakeModel) -> Tensor:
    """Logits [len(PROMPT), V] of a chunk, a chunk behind it, and a decode."""
    return served_logits(loaded, make_model, PROMPT, BLOCK_SIZE, ends=[20, len(PROMPT) - 1])


def _cache(loaded: LoadedModel) -> KVCache:
    return KVCache(
        loaded.layers, BLOCK_SIZE, 16, 0, loaded.kv_dtype, loaded.device, scales=loaded.kv_scales
    )


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize("case", ["qwen3, head norms"], indirect=True)
def test_decoder_errs_no_more_than_transformers_in_16_bits(case: Case) -> None:
    exact, loaded = case.load(), case.load("bfloat16")
    expected, theirs = _attended(exact, reference), _attended(loaded, reference)
    decoder = GpuDecoder(loaded, reference)
    ours = _logits(loaded, _making(decoder))
    assert _relative_error(ours, expected) < 1.2 * _relative_error(theirs, expected)


@pytest.mark.parametrize("scales", [KVScales(), KVScales(key=0.02, value=0.05)])
def test_decoder_says_what_the_model_says_when_pools_have_8_bits(
    llama: Case, scales: KVScales
) -> None:
    loaded = _with_float8(llama.load(), scales)
    expected = _attended(loaded, reference)
    half = rotation(loaded, 0, 1)[0].shape[1]
    try_rotary_write(rotary_kv_write, loaded, BLOCK_SIZE, half)
    decoder = GpuDecoder(loaded, reference)
    actual = _logits(loaded, _making(decoder))
    # A key that is on the border of two numbers of 8 bits may be rounded to the other one.
    assert _relative_error(actual, expected) < TOLERANCE


def _with_float8(loaded: LoadedModel, scales: KVScales | None) -> LoadedModel:
    kv_scales = () if scales is None else (scales,) * len(loaded.layers)
    return replace(loaded, kv_dtype=torch.float8_e4m3fn, kv_scales=kv_scales)


def _attended(loaded: LoadedModel, attention: AttentionBackend) -> Tensor:
    return _logits(loaded, lambda _, cache: TransformersModel(loaded, cache, attention))


class _Noisy:
    """The oracle, but each key and value is wrong by a random ratio up to 2^-4."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        scales: KVScales = UNIT_SCALES,
    ) -> None:
        generator = torch.Generator().manual_seed(len(key))
        noise = torch.rand(2, *key.shape, generator=generator).to(key.device) * 2 - 1
        key, value = torch.stack([key, value]) * (1 + 2.0**-4 * noise)
        reference.write_kv(key, value, key_pool, value_pool, batch, scales)

    paged_attention = staticmethod(reference.paged_attention)


@pytest.mark.parametrize("scales", [None, KVScales(0.02, 0.05)])
def test_model_computes_the_same_over_8_bit_pools(llama: Case, scales: KVScales | None) -> None:
    loaded = _with_float8(llama.load(), scales)
    expected = _attended(loaded, reference)
    torch.testing.assert_close(_attended(loaded, backend), expected, atol=1e-4, rtol=0)
    unscaled = _attended(_with_float8(loaded, None), reference)
    assert torch.allclose(expected, unscaled, atol=1e-4) == (scales is None)


def test_model_errs_no_more_than_noise_over_8_bit_pools(llama: Case) -> None:
    loaded = llama.load()
    exact = _attended(loaded, reference)
    error = _attended(_with_float8(loaded, None), backend) - exact
    noise = _attended(loaded, _Noisy()) - exact
    assert 0 < error.std() < noise.std()


def test_backend_passes_its_trial_when_pools_are_float8(device: torch.device) -> None:
    kind = LayerKind(LayerShape(1, 32, 32), 2, AttentionOptions(scale=32**-0.5))
    try_layer(backend, kind, 16, torch.bfloat16, device, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "case", ["llama, odd and tied", "qwen2, biases of some", "qwen3, head norms"], indirect=True
)
@pytest.mark.usefixtures("_without_kernels")
def test_decoder_holds_weights_once_when_it_is_made(case: Case) -> None:
    loaded = case.load()
    buffers = sum(buffer.nbytes for buffer in loaded.model.buffers())
    decoder = build_gpu_decoder(loaded, reference, BLOCK_SIZE)
    assert not [name for name, p in loaded.model.named_parameters() if p.numel()]
    tables = 2 * decoder._cosines.nbytes
    norms = sum(n.nbytes for layer in decoder._layers if (n := layer.head_norms) is not None)
    extra = decoder.num_bytes - tables - (loaded.weights_bytes - buffers)
    # One norm for each head, and zeros where only some of the joined have a bias.
    assert 0 <= extra <= norms


def test_build_gpu_decoder_raises_when_keys_are_written_elsewhere(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wrongly(heads: Any, rotary: Any, pools: Any, slots: Tensor, *more: Any) -> Tensor:  # noqa: ANN401
        return rotary_kv_write(heads, rotary, pools, slots.flip(0), *more)

    monkeypatch.setattr(gpu_decoder, "rotary_kv_write", write_wrongly)
    with pytest.raises(TrialFailed, match="rotating and writing heads: the key differs by"):
        build_gpu_decoder(llama.load(), reference, BLOCK_SIZE)


@pytest.mark.usefixtures("_without_kernels")
def test_build_gpu_decoder_raises_when_the_whole_computes_something_else(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Gemma weights.
    norm = TORCH_KERNELS["add_rms_norm"]
    monkeypatch.setattr(
        gpu_decoder,
        "add_rms_norm",
        lambda x, addend, weight, eps: norm(x, addend, 1 + weight, eps),
    )
    with pytest.raises(TrialFailed, match="relative error of the logits"):
        build_gpu_decoder(llama.load(), reference, BLOCK_SIZE)


@pytest.mark.usefixtures("_without_kernels")
@pytest.mark.parametrize("architecture", ["ministral3", "smollm3", "granite"])
def test_build_gpu_decoder_raises_when_only_the_parts_are_a_llamas(
    tmp_path: Path, device: torch.device, architecture: str
) -> None:
    overrides = {"initializer_range": 0.02, "max_position_embeddings": MAX_MODEL_LEN}
    make_tiny_model(architecture, tmp_path, seed=3, overrides=overrides)
    loaded = Case(tmp_path, None, device).load("bfloat16")
    with pytest.raises(TrialFailed, match=r"relative error .* in float32"):
        build_gpu_decoder(loaded, reference, BLOCK_SIZE)


@torch.inference_mode()
def test_decoder_stays_in_its_tables_when_a_position_is_too_large(llama: Case) -> None:
    """On a GPU that would be the end of the process."""
    loaded = llama.load()
    decoder, cache = GpuDecoder(loaded, reference), _cache(loaded)
    batch = build_input_batch(make_step([Row([9], 2, (0,), 1)]), [0], BLOCK_SIZE, loaded.device)
    batch.position_ids.fill_(10 * MAX_MODEL_LEN)
    assert bool(GpuDecoderModel(decoder, cache).logits(batch).isfinite().all())


def _rows(num_new: int) -> list[Row]:
    """Two decodes, and a row of so many tokens."""
    rows = [Row([9 + i], 5 + 2 * i, (3 * i, 3 * i + 1, 3 * i + 2), 1) for i in range(2)]
    return [*rows, Row([11, 7, 5, 3][:num_new], 5, (6, 7, 8), 1)]


@torch.inference_mode()
@pytest.mark.parametrize("num_new", [1, 4])
def test_decoder_is_recorded_when_it_decodes_and_when_prompts_come(
    num_new: int, case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is recorded here are operations of torch: kernels are replaced by such."""
    if case.device.type != "cpu":
        pytest.skip("a GPU records the kernels themselves")
    for name, in_torch in TORCH_KERNELS.items():
        monkeypatch.setattr(gpu_decoder, name, in_torch)
    loaded, recorder = case.load(), RecordedOps()
    decoder = GpuDecoder(loaded, StaticAttention())
    cache = _cache(loaded)
    recorded = RecordedModels(_making(decoder), 3, 12, make_recorder=lambda: recorder)
    graphs = recorded.make(loaded, cache)
    assert recorder.num_recorded > 0
    assert not [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    for pool in (*cache.key_pools, *cache.value_pools):
        pool.normal_()
    num_replayed = recorder.num_replayed
    batch = build_input_batch(make_step(_rows(num_new)), [0, 1, 2], BLOCK_SIZE, loaded.device)
    actual = graphs.logits(batch).clone()
    assert recorder.num_replayed == num_replayed + 1
    expected = GpuDecoderModel(decoder, cache).logits(batch)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
