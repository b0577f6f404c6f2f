"""A whole model whose keys and values have 8 bits, attending in Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.kv_cache import KVCache, LayerShape
from executor_service.model.input_batch import build_input_batch
from executor_service.model.loaded_model import LayerKind, LoadedModel
from executor_service.model.paged_model import TransformersModel
from executor_service.steps.sampling_params import SamplingParams
from executor_service.trials.attention_trial import try_layer
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import (
    UNIT_SCALES,
    AttentionBackend,
    AttentionOptions,
    KVScales,
    PagedBatch,
)
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import Row, make_step

pytest.importorskip("triton", reason="triton is not installed")

FLOAT8 = torch.float8_e4m3fn
BLOCK_SIZE = 8
PROMPT = [(11 * i + 5) % 90 for i in range(37)]
# Rounding to 3 bits behind the point errs by 2^-4 of a number at most.
LARGEST_ERROR = 2.0**-4
SAME_POOLS_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> LoadedModel:
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=4)
    return load_model(ModelConfig(str(directory), device=str(device), dtype="float32"))


@torch.inference_mode()
def _logits(loaded: LoadedModel, backend: AttentionBackend) -> Tensor:
    """Of all tokens of PROMPT, [len(PROMPT), V]: a chunk, a chunk behind it, a decode."""
    cache = KVCache(
        loaded.layers, BLOCK_SIZE, 6, 0, loaded.kv_dtype, loaded.device, scales=loaded.kv_scales
    )
    model = TransformersModel(loaded, cache, backend)
    params, tokens, parts = SamplingParams(num_prompt_logprobs=0), [*PROMPT, 7], []
    ends = (20, len(PROMPT) - 1, len(PROMPT))
    for start, end in zip((0, *ends), ends, strict=False):
        row = Row(tokens[start:end], start, (5, 0, 3, 1, 2), len(tokens), False, params)
        batch = build_input_batch(make_step([row]), [0], BLOCK_SIZE, loaded.device)
        parts.append(model.logits(batch).clone())
    return torch.cat(parts).cpu()


class _Noisy:
    """The oracle, but each key and value is wrong by a random ratio up to LARGEST_ERROR."""

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
        key, value = torch.stack([key, value]) * (1 + LARGEST_ERROR * noise)
        reference.write_kv(key, value, key_pool, value_pool, batch, scales)

    paged_attention = staticmethod(reference.paged_attention)


def test_model_says_the_same_when_triton_and_torch_share_8_bit_pools(loaded: LoadedModel) -> None:
    from splitserve_kernels.gpu.attention import backend

    narrow = replace(loaded, kv_dtype=FLOAT8)
    torch.testing.assert_close(
        _logits(narrow, backend), _logits(narrow, reference), atol=SAME_POOLS_TOLERANCE, rtol=0
    )


def test_model_says_the_same_when_triton_and_torch_have_scales(loaded: LoadedModel) -> None:
    from splitserve_kernels.gpu.attention import backend

    scales = (KVScales(0.02, 0.05),) * len(loaded.layers)
    narrow = replace(loaded, kv_dtype=FLOAT8, kv_scales=scales)
    torch.testing.assert_close(
        _logits(narrow, backend), _logits(narrow, reference), atol=SAME_POOLS_TOLERANCE, rtol=0
    )
    unscaled = _logits(replace(loaded, kv_dtype=FLOAT8), reference)
    assert not torch.allclose(_logits(narrow, reference), unscaled, atol=SAME_POOLS_TOLERANCE)


def test_model_errs_no_more_than_noise_does_when_keys_and_values_have_8_bits(
    loaded: LoadedModel,
) -> None:
    from splitserve_kernels.gpu.attention import backend

    exact = _logits(loaded, reference)
    error = _logits(replace(loaded, kv_dtype=FLOAT8), backend) - exact
    noise = _logits(loaded, _Noisy()) - exact
    assert 0 < error.std() < noise.std()


def test_backend_passes_its_trial_when_pools_are_float8(device: torch.device) -> None:
    from splitserve_kernels.gpu.attention import backend

    kind = LayerKind(LayerShape(1, 32, 32), 2, AttentionOptions(scale=32**-0.5))
    try_layer(backend, kind, 16, torch.bfloat16, device, FLOAT8)
