"""Models whose keys and values are 8-bit codes with a scale per token and head, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor_service.backends import Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.device import KVCache
from executor_service.model import LoadedModel
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionOptions, build_paged_batch
from tests.support.models.model_pair import served_logits
from tests.support.steps.step_driver import make_moves

pytestmark = pytest.mark.usefixtures("native_library")

BUNDLED = Path(__file__).parents[3] / "executor_service" / "bundled_model"
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Limits of the mean divergence in nats from the distributions over plain keys and values.
DIVERGENCES = {"int8": 5e-4, "fp8": 1e-2}
AGREEMENTS = {"int8": 0.97, "fp8": 0.9}
LENGTH = 600


def _load(kv_cache_dtype: str, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelConfig(str(BUNDLED), dtype=dtype, kv_cache_dtype=kv_cache_dtype))


def _compute(kv_cache_dtype: str, backend: str, dtype: str = "float32") -> Compute:
    return choose_compute(lambda: _load(kv_cache_dtype, dtype), backend, 16)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 1536, (LENGTH,), generator=generator).tolist()


def _logits(compute: Compute, tokens: list[int], ends: tuple[int, ...] = ()) -> Tensor:
    return served_logits(compute.loaded, compute.make_model, tokens, 16, ends)


@pytest.mark.parametrize("name", CODES)
def test_logits_stay_near_those_of_plain_pools_when_pools_have_codes(
    tokens: list[int], name: str
) -> None:
    plain, coded = (
        _logits(_compute(each, "native"), tokens).log_softmax(-1) for each in ("auto", name)
    )
    divergences = (plain.exp() * (plain - coded)).sum(-1)
    far = slice(LENGTH // 2, None)
    assert 0 < float(divergences[far].mean()) < DIVERGENCES[name]
    agreement = (plain.argmax(-1) == coded.argmax(-1)).float()[far].mean()
    assert float(agreement) >= AGREEMENTS[name]


@pytest.mark.parametrize("name", CODES)
def test_native_decoder_equals_plain_torch_when_pools_have_codes(
    tokens: list[int], name: str
) -> None:
    # A rounding that falls the other way moves a code by one.
    native, torch_one = (
        _logits(_compute(name, backend), tokens[:200]) for backend in ("native", "torch")
    )
    plain = _logits(_compute("auto", "torch"), tokens[:200])
    assert float((native - torch_one).abs().mean()) < 0.1 * float((plain - torch_one).abs().mean())


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_when_a_prompt_comes_in_chunks(
    tokens: list[int], name: str, dtype: str
) -> None:
    compute = _compute(name, "native", dtype)
    whole = _logits(compute, tokens)
    for ends in ((64,), (1, 2, 3, 300), (599,)):
        assert torch.equal(_logits(compute, tokens, ends), whole)


@pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
def test_blocks_carry_scales_when_they_are_moved(codes: torch.dtype) -> None:
    loaded = replace(_load("int8"), kv_dtype=codes)
    layer, cpu = loaded.layers[0], torch.device("cpu")
    cache = KVCache([layer], 4, 4, 2, codes, cpu, scales=loaded.kv_scales[:1])
    pools, scales = (cache.key_pools[0], cache.value_pools[0]), cache.scales[0]
    key, value, query = torch.randn(3, 8, layer.num_kv_heads, layer.key_dim).unbind()
    none, eight, seven, one = (torch.tensor([n]) for n in (0, 8, 7, 1))
    before = build_paged_batch(torch.tensor([[2, 0]]), none, eight, 4)
    reference.write_kv(key, value, *pools, before, scales)
    options = AttentionOptions(0.3)
    at = build_paged_batch(torch.tensor([[2, 0]]), seven, one, 4)
    expected = reference.paged_attention(query[:1], *pools, at, options, scales)
    cache.swap_out(make_moves((2, 1), (0, 0)))
    cache.copy(make_moves((0, 3)))
    for pool in pools:
        pool.view(torch.uint8)[[0, 2]] = 255
    cache.swap_in(make_moves((1, 1)))
    moved = build_paged_batch(torch.tensor([[1, 3]]), seven, one, 4)
    actual = reference.paged_attention(query[:1], *pools, moved, options, scales)
    assert torch.equal(actual, expected)
