from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor_service.errors import OutOfMemory
from executor_service.loaded_model import LoadedModel
from executor_service.memory import CacheConfig, available_host_bytes, build_runner
from executor_service.model_loader import ModelConfig, load_model
from tests.support.tiny_models import make_tiny_model

# 2 layers x 2 heads x (16 + 16) numbers x 4 bytes x 16 tokens.
BLOCK_BYTES = 2 * 2 * 32 * 4 * 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(ModelConfig(str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))))


def _available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr("executor_service.memory.available_host_bytes", lambda: num_bytes)


def test_build_runner_takes_the_numbers_when_they_are_given(loaded: LoadedModel) -> None:
    cache = build_runner(loaded, CacheConfig(8, num_device_blocks=7, num_host_blocks=3)).cache
    assert (cache.block_size, cache.num_device_blocks, cache.num_host_blocks) == (8, 7, 3)
    assert cache.block_bytes == BLOCK_BYTES // 2


def test_build_runner_takes_a_share_of_memory_when_no_number_is_given(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    cache = build_runner(loaded, CacheConfig(16, memory_ratio=0.5)).cache
    # A quarter of what the device pool leaves, since both are in the same memory.
    assert (cache.num_device_blocks, cache.num_host_blocks) == (50, 12)


def test_build_runner_makes_the_host_pool_as_large_as_the_other_when_memory_is_plenty(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 1000 * BLOCK_BYTES)
    cache = build_runner(loaded, CacheConfig(16, num_device_blocks=7)).cache
    assert cache.num_host_blocks == 7


def test_build_runner_makes_no_host_pool_when_the_other_takes_all(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 10 * BLOCK_BYTES)
    cache = build_runner(loaded, CacheConfig(16, num_device_blocks=20)).cache
    assert cache.num_host_blocks == 0


def test_build_runner_stays_below_the_cap_when_memory_is_plenty(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 2**50)
    cache_config = CacheConfig(16, max_cpu_pool_bytes=9 * BLOCK_BYTES, num_host_blocks=0)
    assert build_runner(loaded, cache_config).cache.num_device_blocks == 9


def test_build_runner_says_the_numbers_when_no_block_fits(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, BLOCK_BYTES)
    with pytest.raises(OutOfMemory, match=f"one takes {BLOCK_BYTES} bytes, {BLOCK_BYTES} bytes"):
        build_runner(loaded, CacheConfig(16))


def test_build_runner_says_the_numbers_when_the_host_pool_of_a_gpu_does_not_fit(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 2 * BLOCK_BYTES)
    on_gpu = replace(loaded, device=torch.device("cuda"))
    message = f"num_host_blocks: 3 blocks of {BLOCK_BYTES} bytes .* into {2 * BLOCK_BYTES} bytes"
    with pytest.raises(OutOfMemory, match=message):
        build_runner(on_gpu, CacheConfig(16, num_device_blocks=1, num_host_blocks=3))


def test_available_host_bytes_obeys_the_container_when_it_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"_MEMINFO": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n"}
    files |= {"_CGROUP_LIMIT": "3000000\n", "_CGROUP_USED": "1000000\n"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(f"executor_service.memory.{name}", tmp_path / name)
    assert available_host_bytes() == 2_000_000
    (tmp_path / "_CGROUP_LIMIT").write_text("max\n")
    assert available_host_bytes() == 5000 * 1024


def test_available_host_bytes_is_modest_when_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MEMINFO", "_CGROUP_LIMIT", "_CGROUP_USED"):
        monkeypatch.setattr(f"executor_service.memory.{name}", tmp_path / "missing")
    assert available_host_bytes() == 2 * 2**30
