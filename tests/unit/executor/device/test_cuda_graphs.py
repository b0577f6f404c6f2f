"""What is asked of CUDA when something is recorded, by an imitation with torch's manners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from executor_service.device.streams import CudaGraphs
from executor_service.errors import RecordingFailed

POOL = (0, 3)


@dataclass(slots=True)
class FakeCuda:
    """As much of `torch.cuda` as recording needs.

    As in torch, a recording that breaks off raises a second time when it is ended, and then the
    stream is not left.
    """

    num_streams: int = 0
    pools: list[object] = field(default_factory=list)
    sync_mode: str = "default"
    is_recording: bool = False
    log: list[str] = field(default_factory=list)
    current: FakeStream = field(init=False)

    def __post_init__(self) -> None:
        self.current = FakeStream(self, "compute")

    def Stream(self) -> FakeStream:  # noqa: N802
        self.num_streams += 1
        return FakeStream(self, f"stream {self.num_streams}")

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self)

    def current_stream(self) -> FakeStream:
        return self.current

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

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
        sizes = {(0, 0): 2**30, POOL: 2**21, (0, 2): 7}
        parts = [{"segment_pool_id": pool, "total_size": size} for pool, size in sizes.items()]
        return [*parts, {"segment_pool_id": POOL, "total_size": 2**22}]

    def get_sync_debug_mode(self) -> str:
        return self.sync_mode

    def set_sync_debug_mode(self, mode: str) -> None:
        self.sync_mode = mode

    def wait_for_device(self) -> None:
        """What a model's own code may do."""
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


@dataclass(slots=True, eq=False)
class FakeGraph:
    cuda: FakeCuda
    is_recorded: bool = False

    def pool(self) -> tuple[int, int]:
        return POOL

    def replay(self) -> None:
        assert self.is_recorded
        self.cuda.log.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake: Any = FakeCuda()
    monkeypatch.setattr("executor_service.device.streams._cuda", fake)
    cuda: FakeCuda = fake
    return cuda


def test_all_is_recorded_on_one_stream_and_in_one_pool_when_there_are_many(cuda: FakeCuda) -> None:
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


def test_what_waits_is_found_before_it_is_recorded_and_leaves_all_as_it_was(
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


def test_recording_says_that_the_process_cannot_go_on_when_it_breaks_off(cuda: FakeCuda) -> None:
    graphs, compute = CudaGraphs(), cuda.current
    with pytest.raises(RecordingFailed, match="capture was invalidated"):
        graphs.record(_after(3, cuda.wait_for_device))
    assert cuda.current is compute
