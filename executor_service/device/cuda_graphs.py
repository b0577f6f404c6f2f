"""Records what is asked of a GPU as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from executor_service.errors import RecordingFailed, one_line

# Its streams and graphs have no types.
_cuda: Any = torch.cuda


class Recorder(Protocol):
    """Records what `run` asks of the device."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs `run` once or more; returns what repeats its work on the same memory.

        Raises RecordingFailed if the device is in disorder then; after anything else that it raises
        all is as it was.
        """
        ...

    @property
    def pool_bytes(self) -> int:
        """What recordings keep to compute in; they share it."""
        ...


class CudaGraphs:
    """A Recorder. Its graphs share memory, so only one may run at a time.

    All is run and recorded on one stream: of each that a library was used on, it keeps its memory
    for good.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What would wait for the device is found before it is recorded, and raised."""
        if self._stream is None:
            self._stream = _cuda.Stream()
        current = _cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with _cuda.stream(self._stream):
                # Kernels are compiled and libraries set up before, not while it is recorded.
                run()
                with _no_waits():
                    run()
        finally:
            current.wait_stream(self._stream)
        graph = _cuda.CUDAGraph()
        try:
            with _cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        except Exception as error:
            # Torch does not leave the stream, and its allocator takes the recording for unfinished.
            _cuda.set_stream(current)
            raise RecordingFailed(f"{type(error).__name__}: {one_line(error)}") from error
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay

    @property
    def pool_bytes(self) -> int:
        if self._pool is None:
            return 0
        segments = _cuda.memory_snapshot()
        return sum(
            segment["total_size"]
            for segment in segments
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )


@contextmanager
def _no_waits() -> Iterator[None]:
    """Inside, what waits for the device raises."""
    before = _cuda.get_sync_debug_mode()
    _cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        _cuda.set_sync_debug_mode(before)
