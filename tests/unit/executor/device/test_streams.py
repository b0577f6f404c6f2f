from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from executor_service.device.streams import CudaStreams, HostStreams, streams_of

GPU = torch.device("cuda", 0)


@dataclass(slots=True)
class FakeCuda:
    """As much of `torch.cuda` as streams need; `log`: what was asked of it."""

    log: list[str] = field(default_factory=list)
    current: FakeStream = field(init=False)

    def __post_init__(self) -> None:
        self.current = FakeStream(self, "compute")

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        assert device == GPU
        return FakeStream(self, "swap")

    def Event(self, *, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, is_timed=enable_timing)

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == GPU
        return self.current

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.log.append(f"on {device}")
        yield
        self.log.append(f"off {device}")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@dataclass(slots=True)
class FakeStream:
    cuda: FakeCuda
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


@dataclass(slots=True)
class FakeEvent:
    """Its time is how much had been asked for when it was recorded."""

    cuda: FakeCuda
    time: int = 0
    is_timed: bool = False

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"event on {stream.name}")
        self.time = len(self.cuda.log)

    def synchronize(self) -> None:
        self.cuda.log.append("host waits")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.is_timed
        assert end.is_timed
        return (end.time - self.time) * 0.25  # ms


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake: Any = FakeCuda()
    monkeypatch.setattr("executor_service.device.streams._cuda", fake)
    cuda: FakeCuda = fake
    return cuda


def test_streams_of_a_gpu_wait_for_each_other_when_asked(cuda: FakeCuda) -> None:
    streams = streams_of(GPU)
    assert isinstance(streams, CudaStreams)
    streams.swap_after_compute()
    streams.compute_after_swap()
    assert cuda.log == ["swap waits for compute", "compute waits for swap"]


def test_streams_of_a_gpu_have_the_thread_launch_on_it_when_a_step_begins(cuda: FakeCuda) -> None:
    with streams_of(GPU).on_device():
        cuda.log.append("launch")
    assert cuda.log == ["on cuda:0", "launch", "off cuda:0"]


def test_timer_of_a_gpu_waits_only_when_it_is_read(cuda: FakeCuda) -> None:
    streams = streams_of(GPU)
    with streams.swapping():
        timer = streams.start_timer()
        streams.start_timer()
        timer.stop()
    assert cuda.log == ["event on swap"] * 3
    assert timer.elapsed_us() == 500
    assert cuda.log[3:] == ["host waits"]
    streams.start_timer()
    assert cuda.log[4:] == ["event on compute"]


def test_mark_of_a_gpu_is_waited_for_when_somebody_asks(cuda: FakeCuda) -> None:
    streams = streams_of(GPU)
    assert not streams.shares_memory
    mark = streams.mark()
    assert cuda.log == ["event on compute"]
    mark.wait()
    assert cuda.log == ["event on compute", "host waits"]


def test_timer_of_a_cpu_tells_the_time_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 5.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, HostStreams)
    timer = streams.start_timer()
    timer.stop()
    assert timer.elapsed_us() == 250_000
