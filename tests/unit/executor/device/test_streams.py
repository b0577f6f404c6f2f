"""Streams and recordings of a GPU, by an imitation of `torch.cuda` with its manners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from executor_service.device import CudaGraphs, CudaStreams, HostStreams, streams_of
from executor_service.errors import RecordingFailed

GPU = torch.device("cuda", 0)


POOL = (0, 3)


@dataclass(slots=True)
class FakeCuda:
    """As much of `torch.cuda` as streams and recordings need; `log`: what was asked of it.

    As in torch, a recording that breaks off raises a second time when it is ended, and then the
    stream is not left.
    """

    log: list[str] = field(default_factory=list)
    num_streams: int = 0
    pools: list[object] = field(default_factory=list)
    sync_mode: str = "default"
    is_recording: bool = False
    current: FakeStream = field(init=False)

    def __post_init__(self) -> None:
        self.current = FakeStream(self, "compute")

    def Stream(self, device: torch.device = GPU) -> FakeStream:  # noqa: N802
        assert device == GPU
        self.num_streams += 1
        return FakeStream(self, f"stream {self.num_streams}")

    def Event(self, *, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, is_timed=enable_timing)

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self)

    def current_stream(self, device: torch.device = GPU) -> FakeStream:
        assert device == GPU
        return self.current

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.log.append(f"on {device}")
        yield
        self.log.append(f"off {device}")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: FakeGraph, *, pool: object, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.current, self.is_recording = self.current, stream, True
        self.pools.append(pool)
        try:
            yield
        except Exception as error:
            raise RuntimeError("capture_end: the capture was invalidated") from error
        self.current, self.is_recording = before, False
        graph.is_recorded = True

    def memory_snapshot(self) -> list[dict[str, Any]]:
        sizes = [((0, 0), 2**30), (POOL, 2**21), ((0, 2), 7), (POOL, 2**22)]
        return [{"segment_pool_id": pool, "total_size": size} for pool, size in sizes]

    def get_sync_debug_mode(self) -> str:
        return self.sync_mode

    def set_sync_debug_mode(self, mode: str) -> None:
        self.sync_mode = mode

    def wait_for_device(self) -> None:
        """Does what a model's own code may do."""
        if self.is_recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")


@dataclass(slots=True, eq=False)
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
    assert cuda.log == ["stream 1 waits for compute", "compute waits for stream 1"]


def test_streams_of_a_gpu_set_the_device_of_the_thread(cuda: FakeCuda) -> None:
    with streams_of(GPU).on_device():
        cuda.log.append("launch")
    assert cuda.log == ["on cuda:0", "launch", "off cuda:0"]


def test_timer_of_a_gpu_waits_only_when_it_is_read(cuda: FakeCuda) -> None:
    streams = streams_of(GPU)
    with streams.swapping():
        timer = streams.start_timer()
        streams.start_timer()
        timer.stop()
    assert cuda.log == ["event on stream 1"] * 3
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


@dataclass(slots=True, eq=False)
class FakeGraph:
    cuda: FakeCuda
    is_recorded: bool = False

    def pool(self) -> tuple[int, int]:
        return POOL

    def replay(self) -> None:
        assert self.is_recorded
        self.cuda.log.append("replay")


def test_graphs_share_one_stream_and_one_pool(cuda: FakeCuda) -> None:
    graphs, compute, seen = CudaGraphs(), cuda.current, set()
    replays = [graphs.record(lambda: seen.add(cuda.current.name)) for _ in range(5)]
    assert seen == {"stream 1"}
    assert cuda.num_streams == 1
    assert cuda.pools == [None, POOL, POOL, POOL, POOL]
    assert cuda.current is compute
    assert (cuda.is_recording, cuda.sync_mode) == (False, "default")
    cuda.log.clear()
    for replay in replays:
        replay()
    assert cuda.log == ["replay"] * 5


def test_pool_bytes_are_those_of_the_recordings_alone(cuda: FakeCuda) -> None:
    graphs = CudaGraphs()
    assert graphs.pool_bytes == 0
    graphs.record(lambda: None)
    assert graphs.pool_bytes == 2**21 + 2**22


def test_graphs_refuse_synchronizing_code_before_they_record(
    cuda: FakeCuda,
) -> None:
    graphs, compute = CudaGraphs(), cuda.current
    with pytest.raises(RuntimeError, match="synchronizing"):
        graphs.record(cuda.wait_for_device)
    assert cuda.current is compute
    assert cuda.pools == []
    assert cuda.sync_mode == "default"
    # What was asked meanwhile is done before what comes next.
    assert cuda.log == ["stream 1 waits for compute", "compute waits for stream 1"]


def _after(number: int, then: Callable[[], None]) -> Callable[[], None]:
    """Does something in its call of that number."""
    calls = iter(range(1, 99))
    return lambda: then() if next(calls) == number else None


def test_graphs_raise_recording_failed_when_a_recording_breaks_off(cuda: FakeCuda) -> None:
    graphs, compute = CudaGraphs(), cuda.current
    with pytest.raises(RecordingFailed, match="capture was invalidated"):
        graphs.record(_after(3, cuda.wait_for_device))
    assert cuda.current is compute
