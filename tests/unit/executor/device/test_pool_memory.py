from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest
import torch

from executor_service.device.kv_cache import Bytes, host_memory, pin_for, pin_for_cuda


@dataclass(slots=True)
class FakeRuntime:
    """Counts what is pinned, as the CUDA runtime does; `status` is what it answers."""

    status: int = 0
    pinned: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        if self.status == 0:
            self.pinned[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    return runtime


def test_host_memory_is_zero_and_pinned_once_when_it_can_be() -> None:
    pinned: list[Bytes] = []
    memory = host_memory(100, pinned.append)
    assert (memory.shape, memory.dtype, int(memory.sum())) == ((100,), torch.uint8, 0)
    assert [array.ctypes.data for array in pinned] == [memory.data_ptr()]


@pytest.mark.parametrize("num_bytes", [1, 100, 2**20, 2**24 + 5])
def test_host_memory_begins_with_a_cache_line(num_bytes: int) -> None:
    memory = host_memory(num_bytes, None)
    assert (len(memory), memory.data_ptr() % 64) == (num_bytes, 0)


def test_host_memory_has_its_pages_when_it_is_pinned() -> None:
    process, num_bytes, resident = psutil.Process(), 2**28, []
    before = process.memory_info().rss
    memory = host_memory(num_bytes, lambda _: resident.append(process.memory_info().rss))
    assert resident[0] - before > 0.9 * len(memory)


def test_host_memory_warns_once_with_the_size_when_it_cannot_be_pinned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: Bytes) -> None:
        raise RuntimeError("the driver says no")

    memory = host_memory(3 * 2**20, refuse)
    assert memory.shape == (3 * 2**20,)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    message = caplog.records[0].getMessage()
    assert message.startswith("host_pool_not_pinned num_bytes=3145728 gib=0.00")
    assert "the driver says no" in message


def test_host_memory_pins_nothing_when_it_is_empty() -> None:
    pinned: list[Bytes] = []
    assert host_memory(0, pinned.append).shape == (0,)
    assert not pinned


def test_pin_for_pins_when_the_device_is_a_gpu() -> None:
    assert pin_for(torch.device("cpu")) is None
    assert pin_for(torch.device("cuda", 1)) is pin_for_cuda


def test_pin_for_cuda_unpins_when_the_memory_is_freed(runtime: FakeRuntime) -> None:
    memory = host_memory(1000, pin_for_cuda)
    assert runtime.pinned == {memory.data_ptr(): 1000}
    view = memory.view(10, 100)
    del memory
    gc.collect()
    assert runtime.pinned
    del view
    gc.collect()
    assert not runtime.pinned


def test_pin_for_cuda_raises_and_forgets_the_error_when_the_runtime_refuses(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.status = 2
    forgotten: list[bool] = []
    monkeypatch.setattr(
        "executor_service.device.kv_cache._forget_error", lambda: forgotten.append(True)
    )
    with pytest.raises(RuntimeError, match="cudaHostRegister: error 2"):
        pin_for_cuda(np.zeros(10, np.uint8))
    assert not runtime.pinned
    assert forgotten == [True]
