"""8-bit keys and values, as far as a machine without a GPU can tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import load_engine
from executor_service.errors import ModelUnsupported
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionOptions, KVScales, build_paged_batch
from splitserve_options import options
from tests.support.models.tiny_models import make_tiny_model

FLOAT8 = torch.float8_e4m3fn
# 2 layers x 2 heads x (16 + 16) numbers x 16 tokens.
NUMBERS_OF_A_BLOCK = 2 * 2 * 32 * 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(ModelConfig(str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))))


def test_load_model_refuses_fp8_by_name_when_on_a_cpu(tmp_path: Path) -> None:
    # There is nothing to load, which is not what it complains of.
    config = ModelConfig(str(tmp_path), kv_cache_dtype="fp8")
    with pytest.raises(ModelUnsupported, match="kv_cache_dtype fp8: not for cpu; allowed: auto"):
        load_model(config)


def test_load_engine_refuses_fp8_by_name_when_on_a_cpu() -> None:
    values = options.parse("executor", ["--kv-cache-dtype=fp8", "--device=cpu"], {})
    with pytest.raises(ModelUnsupported, match="kv_cache_dtype fp8: not for cpu"):
        load_engine(ExecutorConfig.from_options(values), executor_epoch=1)


def test_load_engine_announces_the_dtype_of_the_model_when_left_to_it() -> None:
    values = options.parse("executor", ["--device=cpu", "--num-device-blocks=4"], {})
    info = load_engine(ExecutorConfig.from_options(values), executor_epoch=1).info
    assert info.model.kv_cache_dtype == info.model.dtype


def test_pools_hold_more_blocks_when_numbers_are_narrow(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "executor_service.runner.pool_sizes.available_host_bytes",
        lambda: 100 * 4 * NUMBERS_OF_A_BLOCK,
    )
    narrow = replace(loaded, kv_dtype=FLOAT8)
    cache = build_runner(narrow, CacheConfig(16, memory_fraction=0.5)).cache
    assert (cache.block_bytes, cache.dtype) == (NUMBERS_OF_A_BLOCK, FLOAT8)
    assert (cache.num_device_blocks, cache.num_host_blocks) == (200, 50)
    assert narrow.kv_dtype_name == "float8_e4m3fn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_stores_the_nearest_float8_when_it_writes(dtype: torch.dtype) -> None:
    # Every number that 8 bits can hold, and what lies beside it.
    grid = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    between = (grid[1:] + grid[:-1]) / 2
    numbers = torch.cat([grid, between * (1 - 2**-7), between * (1 + 2**-7), torch.tensor([1e4])])
    numbers = torch.cat([numbers, -numbers]).to(dtype)
    key_pool, value_pool = torch.zeros(2, 1, len(numbers), 1, 1, dtype=FLOAT8)
    count = torch.tensor([len(numbers)])
    batch = build_paged_batch(torch.tensor([[0]]), torch.tensor([0]), count, len(numbers))
    heads = numbers[:, None, None]
    reference.write_kv(heads, -heads, key_pool, value_pool, batch)
    both = torch.cat([grid, -grid])
    nearest = both[(numbers.float()[:, None] - both).abs().argmin(dim=1)]
    torch.testing.assert_close(key_pool.float().flatten(), nearest, atol=0, rtol=0)
    torch.testing.assert_close(value_pool.float().flatten(), -nearest, atol=0, rtol=0)


def test_reference_keeps_nan_when_pools_are_float8() -> None:
    key_pool, value_pool = torch.zeros(2, 1, 1, 1, 1, dtype=FLOAT8)
    zero, one = torch.tensor([0]), torch.tensor([1])
    batch = build_paged_batch(torch.tensor([[0]]), zero, one, 1)
    number = torch.full((1, 1, 1), torch.nan)
    reference.write_kv(number, number, key_pool, value_pool, batch)
    assert key_pool.float().isnan().all()


def test_reference_stores_what_the_scale_leaves_and_gives_it_back() -> None:
    tables, zero, count = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), torch.tensor([4])
    batch = build_paged_batch(tables, zero.long(), count, 4)
    scales = KVScales(key=64.0, value=0.01)
    key, value = torch.full((4, 1, 8), 9000.0), torch.full((4, 1, 8), 0.02)
    key_pool, value_pool = (torch.zeros(1, 4, 1, 8, dtype=FLOAT8) for _ in range(2))
    reference.write_kv(key, value, key_pool, value_pool, batch, scales)
    assert set(key_pool.float().flatten().tolist()) == {144.0}  # of 140.6
    assert set(value_pool.float().flatten().tolist()) == {2.0}
    query = torch.zeros(4, 1, 8)
    options = AttentionOptions(scale=1.0)
    output = reference.paged_attention(query, key_pool, value_pool, batch, options, scales)
    torch.testing.assert_close(output, value)
