from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.device import HostReservations, KVCache
from executor_service.errors import OutOfMemory, StepFailed
from executor_service.model import InputBatch, LoadedModel, PagedModel, torch_model
from executor_service.runner import CacheConfig, build_runner

# 2 layers x 2 heads x (16 + 16) numbers x 4 bytes x 16 tokens.
BLOCK_BYTES = 2 * 2 * 32 * 4 * 16


def _available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(
        "executor_service.runner.pool_sizes.available_host_bytes", lambda: num_bytes
    )


@pytest.mark.parametrize(
    ("available", "config", "num_blocks"),
    [
        (100, CacheConfig(16, num_device_blocks=7, num_host_blocks=3), (7, 3)),
        # A quarter of what the device pool leaves, since both are in the same memory.
        (100, CacheConfig(16, memory_fraction=0.5), (50, 12)),
        # At most as large as the other.
        (1000, CacheConfig(16, num_device_blocks=7), (7, 7)),
        (10, CacheConfig(16, num_device_blocks=10), (10, 0)),
        (2**40, CacheConfig(16, max_cpu_pool_bytes=9 * BLOCK_BYTES, num_host_blocks=0), (9, 0)),
    ],
    ids=["numbers", "share", "plenty", "nothing left", "cap"],
)
def test_build_runner_sizes_both_pools_by_memory_and_numbers(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    config: CacheConfig,
    num_blocks: tuple[int, int],
) -> None:
    _available(monkeypatch, available * BLOCK_BYTES)
    cache = build_runner(loaded, config).cache
    assert (cache.num_device_blocks, cache.num_host_blocks) == num_blocks
    assert (cache.block_size, cache.block_bytes) == (16, BLOCK_BYTES)


def test_pools_hold_more_blocks_when_numbers_are_narrow(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    narrow = replace(loaded, kv_dtype=torch.float8_e4m3fn)
    cache = build_runner(narrow, CacheConfig(16, memory_fraction=0.5)).cache
    assert (cache.block_bytes, cache.dtype) == (BLOCK_BYTES // 4, torch.float8_e4m3fn)
    assert (cache.num_device_blocks, cache.num_host_blocks) == (200, 50)
    assert narrow.kv_dtype_name == "float8_e4m3fn"


def test_build_runner_says_the_numbers_when_no_block_fits(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, BLOCK_BYTES)
    with pytest.raises(OutOfMemory, match=f"one takes {BLOCK_BYTES} bytes, {BLOCK_BYTES} bytes"):
        build_runner(loaded, CacheConfig(16))


# -- with the largest step -------------------------------------------------------------------------


@dataclass(slots=True)
class _Meter:
    """Lets the step run and says what it is told to."""

    step_bytes: int
    num_runs: int = 0

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        self.num_runs += 1
        return self.step_bytes


@dataclass(slots=True)
class _Seen:
    """Makes models that note the batches they get, or raise `error`."""

    error: Exception | None = None
    batches: list[InputBatch] = field(default_factory=list)
    caches: list[KVCache] = field(default_factory=list)

    def make_model(self, loaded: LoadedModel, cache: KVCache) -> PagedModel:
        self.caches.append(cache)
        return _SeenModel(torch_model(loaded, cache), self)


class _SeenModel:
    def __init__(self, model: PagedModel, seen: _Seen) -> None:
        self.model = model
        self.seen = seen

    def logits(self, batch: InputBatch) -> torch.Tensor:
        self.seen.batches.append(batch)
        if self.seen.error is not None:
            raise self.seen.error
        return self.model.logits(batch)


def _stepping(**changes: Any) -> CacheConfig:  # noqa: ANN401
    """Measures a step of 4 rows and 24 tokens, unless `changes` say otherwise."""
    values = {"max_num_rows": 4, "max_num_batched_tokens": 24, "num_host_blocks": 0}
    return CacheConfig(**{"block_size": 16, "memory_fraction": 0.5, **values, **changes})


def test_build_runner_leaves_room_for_the_largest_step(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    meter, seen = _Meter(20 * BLOCK_BYTES), _Seen()
    runner = build_runner(loaded, _stepping(num_host_blocks=None), seen.make_model, meter=meter)
    # 50 by ratio, less 20; the host pool gets a quarter of the 50 that both leave.
    assert (runner.cache.num_device_blocks, runner.cache.num_host_blocks) == (30, 12)
    [batch] = seen.batches
    assert batch.input_ids.shape == (1, 24)
    assert len(batch.readout.sampling_rows) == 4
    assert seen.caches[-1] is runner.cache


def test_build_runner_frees_the_blocks_of_the_largest_step(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    caches: list[weakref.ref[KVCache]] = []

    def make_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
        assert all(earlier() is None for earlier in caches)
        caches.append(weakref.ref(cache))
        return torch_model(loaded, cache)

    build_runner(loaded, _stepping(), make_model, meter=_Meter(0))
    assert len(caches) == 2


@pytest.mark.parametrize(
    ("changes", "num_runs"),
    [
        ({}, 1),
        ({"num_device_blocks": 5}, 0),
        ({"max_num_batched_tokens": 0}, 0),
        # The cap leaves as much again.
        ({"max_cpu_pool_bytes": 25 * BLOCK_BYTES}, 0),
        ({"max_cpu_pool_bytes": 26 * BLOCK_BYTES}, 1),
        ({"max_cpu_pool_bytes": None}, 1),
    ],
)
def test_build_runner_measures_when_the_pool_is_large(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    num_runs: int,
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    meter = _Meter(0)
    build_runner(loaded, _stepping(**changes), meter=meter)
    assert meter.num_runs == num_runs


def test_build_runner_raises_when_the_largest_step_leaves_no_block(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    weights = f"{loaded.weights_bytes / 2**10:.2f} KiB"
    with pytest.raises(OutOfMemory) as caught:
        build_runner(loaded, _stepping(), meter=_Meter(50 * BLOCK_BYTES))
    assert str(caught.value) == (
        f"no room for KV blocks: one takes {BLOCK_BYTES} bytes, {100 * BLOCK_BYTES} bytes are free"
        f" on cpu besides the weights ({weights}); memory fraction 0.5 allows"
        " 400.00 KiB, and a step takes 400.00 KiB; raise --memory-fraction, or lower"
        " --max-num-batched-tokens or --max-num-seqs"
    )


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("no"), RuntimeError("can't allocate memory")]
)
def test_build_runner_raises_when_the_largest_step_does_not_fit(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    message = f"24 tokens in 4 rows, {100 * BLOCK_BYTES} bytes are free .* lower --max-num-batched"
    with pytest.raises(OutOfMemory, match=message):
        build_runner(loaded, _stepping(), _Seen(error).make_model, meter=_Meter(0))


def test_build_runner_raises_step_failed_when_the_largest_step_fails(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    with pytest.raises(StepFailed, match="all rows failed; last error: ValueError"):
        build_runner(loaded, _stepping(), _Seen(ValueError()).make_model, meter=_Meter(0))


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("device", {"num_device_blocks": 101}),
        ("host", {"num_device_blocks": 60, "num_host_blocks": 41}),
    ],
)
def test_build_runner_says_the_numbers_when_a_pool_does_not_fit(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, option: str, changes: dict[str, Any]
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    blocks = changes[f"num_{option}_blocks"]
    message = rf"{option} pool does not fit: {blocks} blocks of {BLOCK_BYTES} bytes take .*iB, "
    with pytest.raises(OutOfMemory, match=rf"{message}.*; lower --num-{option}-blocks$"):
        build_runner(loaded, CacheConfig(16, **changes))


def test_build_runner_says_what_went_where_when_it_is_done(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _available(monkeypatch, 100 * BLOCK_BYTES)
    with caplog.at_level(logging.INFO, "executor_service"):
        build_runner(loaded, _stepping(num_host_blocks=3), meter=_Meter(10 * BLOCK_BYTES))
    [line] = [text for text in caplog.messages if text.startswith("memory_planned")]
    assert line == (
        f"memory_planned device=cpu weights='{loaded.weights_bytes / 2**10:.2f} KiB'"
        " step='80.00 KiB' device_pool='320.00 KiB' host_pool='24.00 KiB' left='376.00 KiB'"
    )


def test_build_runner_measures_for_real_when_it_is_not_told_how(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    cache_config = _stepping(max_auto_blocks=4, max_cpu_pool_bytes=None)
    with caplog.at_level(logging.INFO, "executor_service"):
        runner = build_runner(loaded, cache_config)
    assert runner.cache.num_device_blocks == 4
    assert "largest_step_measured" in caplog.text
    assert "not measured" not in caplog.text


def test_build_runner_leaves_out_what_other_executors_reserved(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # More than this process comes to use meanwhile.
    available = 2**20 * BLOCK_BYTES
    _available(monkeypatch, available)
    monkeypatch.setattr("executor_service.device.memory._used_bytes", lambda _: 0)
    config = CacheConfig(16, memory_fraction=1e-4, num_host_blocks=0)
    others = HostReservations(tmp_path)
    alone = build_runner(loaded, config, reservations=others).cache.num_device_blocks
    release = others.reserve(available // 2)
    fewer = build_runner(loaded, config, reservations=others).cache.num_device_blocks
    assert (alone, fewer) == (104, 52)
    release()
    gc.collect()
    # The pools of the first are gone; the model is bound to the others.
    assert len(list(tmp_path.glob("*.reservation"))) == 1


def test_build_runner_shares_memory_when_several_start_together(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _available(monkeypatch, 4000 * BLOCK_BYTES)
    monkeypatch.setattr("executor_service.device.memory._used_bytes", lambda _: 0)
    runners = [
        build_runner(loaded, CacheConfig(16), reservations=HostReservations(tmp_path, 4))
        for _ in range(4)
    ]
    sizes = [each.cache.num_device_blocks + each.cache.num_host_blocks for each in runners]
    assert sum(sizes) <= 4000
    assert min(sizes) > 700
