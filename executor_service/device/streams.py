"""Streams, timers and marks of a device, and recording of CUDA graphs.

A step computes on one stream and swaps blocks on another, so that both overlap where possible. Work
on one stream is done in order; between streams, only the waits named here give an order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_service.errors import RecordingFailed, one_line

# The streams, events and graphs of torch.cuda have no types.
_cuda: Any = torch.cuda


class Timer(Protocol):
    """Measures the time that work on a stream takes; starts after the work queued before."""

    def stop(self) -> None:
        """Ends the timer after all work queued so far on its stream, which must be in use."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the end is reached."""
        ...

    def wait(self) -> None:
        """Waits for the end. May be called in any thread."""
        ...

    def elapsed_us(self) -> int:
        """Returns the microseconds from start to end; waits for the end."""
        ...


class StreamMark(Protocol):
    """Point in the work of a stream."""

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Returns when the stream has done the work queued before the mark."""
        ...


class DeviceStreams(Protocol):
    """Compute stream of a device, which is the one in use, and the swap stream beside it."""

    @property
    def shares_memory(self) -> bool:
        """Whether host memory is device memory."""
        ...

    def on_device(self) -> AbstractContextManager[object]:
        """Context in which this thread launches work on this device."""
        ...

    def swapping(self) -> AbstractContextManager[object]:
        """Context in which the swap stream is in use."""
        ...

    def swap_after_compute(self) -> None:
        """Makes later work of the swap stream wait for all compute work queued so far."""
        ...

    def compute_after_swap(self) -> None:
        """Makes later compute work wait for all work of the swap stream queued so far."""
        ...

    def start_timer(self) -> Timer:
        """Starts a timer on the stream in use."""
        ...

    def mark(self) -> StreamMark:
        """Returns a mark behind all work queued so far on the stream in use."""
        ...

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Queues a copy of `tensor` to the host; the result may be read once that work is done."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Returns host memory, [num_bytes] uint8, that the device reads without the host."""
        ...

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        """Queues a copy of `source`, in a host buffer, over `target` on the device.

        `source` is read when the stream in use gets there, so it must not change before.
        """
        ...


class HostStreams:
    """Streams of a CPU, which finishes work before the call returns: everything is in order."""

    @property
    def shares_memory(self) -> bool:
        return True

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def swapping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def swap_after_compute(self) -> None:
        """Does nothing: earlier work is done."""

    def compute_after_swap(self) -> None:
        """Does nothing: earlier work is done."""

    def start_timer(self) -> HostTimer:
        return HostTimer()

    def mark(self) -> HostMark:
        return HostMark()

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)


class HostMark:
    """Mark of a CPU, reached at once because CPU work is synchronous."""

    @property
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""


class HostTimer:
    """Timer of a CPU, by the monotonic clock."""

    def __init__(self) -> None:
        self._start_s = self._end_s = time.perf_counter()

    def stop(self) -> None:
        self._end_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""

    def elapsed_us(self) -> int:
        return int((self._end_s - self._start_s) * 1e6)


class CudaStreams:
    """Streams of a GPU: torch's current stream computes; swaps have a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._swap = _cuda.Stream(device)

    @property
    def shares_memory(self) -> bool:
        return False

    def on_device(self) -> AbstractContextManager[object]:
        # The current device is set per thread; without this it is the first.
        context: AbstractContextManager[object] = _cuda.device(self._device)
        return context

    def swapping(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = _cuda.stream(self._swap)
        return context

    def swap_after_compute(self) -> None:
        self._swap.wait_stream(_cuda.current_stream(self._device))

    def compute_after_swap(self) -> None:
        _cuda.current_stream(self._device).wait_stream(self._swap)

    def start_timer(self) -> CudaTimer:
        return CudaTimer(self._device)

    def mark(self) -> CudaMark:
        return CudaMark(self._device)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        # A copy into pageable memory would wait for all work queued before.
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class CudaMark:
    """Mark of a GPU: an event."""

    def __init__(self, device: torch.device) -> None:
        self._event = _cuda.Event()
        self._event.record(_cuda.current_stream(device))

    @property
    def is_over(self) -> bool:
        is_over: bool = self._event.query()
        return is_over

    def wait(self) -> None:
        self._event.synchronize()


class CudaTimer:
    """Timer of a GPU, by two events, so that the host need not wait to read the time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = _cuda.Event(enable_timing=True)
        self._end = _cuda.Event(enable_timing=True)
        self._start.record(_cuda.current_stream(device))

    def stop(self) -> None:
        self._end.record(_cuda.current_stream(self._device))

    @property
    def is_over(self) -> bool:
        is_over: bool = self._end.query()
        return is_over

    def wait(self) -> None:
        self._end.synchronize()

    def elapsed_us(self) -> int:
        self._end.synchronize()
        return int(self._start.elapsed_time(self._end) * 1e3)


def streams_of(device: torch.device) -> DeviceStreams:
    """Returns the streams of `device`."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


# -- Recording of CUDA graphs ----------------------------------------------------------------------


class Recorder(Protocol):
    """Records device work so that it can be repeated."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs `run` once or more; returns a function that repeats its work on the same memory.

        Raises RecordingFailed if the device is unusable afterwards; after any other error the
        device is as before.
        """
        ...

    @property
    def pool_bytes(self) -> int:
        """Bytes that recordings keep as working memory, which they share."""
        ...


class CudaGraphs:
    """Implements Recorder. The graphs share memory, so only one may run at a time.

    All work is run and recorded on one stream, because libraries keep memory for good for each
    stream that they were used on.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records `run`; work that would wait for the device raises before the recording begins."""
        if self._stream is None:
            self._stream = _cuda.Stream()
        current = _cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with _cuda.stream(self._stream):
                # Kernels are compiled and libraries set up in this run, not while recording.
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
            # Torch stays on the recording stream, and its allocator takes the recording for
            # unfinished.
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
    """Context in which an operation that waits for the device raises."""
    before = _cuda.get_sync_debug_mode()
    _cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        _cuda.set_sync_debug_mode(before)
