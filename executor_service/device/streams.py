"""The order of what a device is asked to do, and how long it takes.

A step computes on one stream and swaps blocks on another, so that the two overlap where nothing
forbids it. What is asked of one stream happens in that order; between streams only the waits that
are named here are an order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_service.errors import RecordingFailed, one_line

# Its streams and events have no types.
_cuda: Any = torch.cuda


class Timer(Protocol):
    """Runs from when its stream is done with what it was asked before."""

    def stop(self) -> None:
        """Ends it when its stream, which is in use, is done with what it was asked so far."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the end has come."""
        ...

    def wait(self) -> None:
        """Waits for the end. May be called in any thread."""
        ...

    def elapsed_us(self) -> int:
        """From start to end; waits for the end."""
        ...


class Mark(Protocol):
    """A point in what a stream was asked."""

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Returns when the stream is done with what it was asked before."""
        ...


class DeviceStreams(Protocol):
    """The compute stream of a device, which is in use, and the swap stream beside it."""

    @property
    def shares_memory(self) -> bool:
        """Whether memory of the host is memory of the device."""
        ...

    def on_device(self) -> AbstractContextManager[object]:
        """Inside, what this thread launches goes to this device."""
        ...

    def swapping(self) -> AbstractContextManager[object]:
        """Inside, the swap stream is in use."""
        ...

    def swap_after_compute(self) -> None:
        """What the swap stream is asked from now on waits for all that compute was asked so far."""
        ...

    def compute_after_swap(self) -> None:
        """What compute is asked from now on waits for all that the swap stream was asked so far."""
        ...

    def start_timer(self) -> Timer:
        """A timer of the stream in use."""
        ...

    def mark(self) -> Mark:
        """Behind all that the stream in use was asked so far."""
        ...

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Asks the stream in use for `tensor` on the host; to be read when that is done."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of the host, which the device reads without the host."""
        ...

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        """Asks the stream in use to copy `source`, in a host buffer, over `target` on the device.

        It is read when the stream gets there.
        """
        ...


class HostStreams:
    """Of a CPU, which has done what it is asked when it returns: all is in order."""

    @property
    def shares_memory(self) -> bool:
        return True

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def swapping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def swap_after_compute(self) -> None:
        """Nothing to do: what was asked before is done."""

    def compute_after_swap(self) -> None:
        """Nothing to do: what was asked before is done."""

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
    """All is done."""

    @property
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """It is."""


class HostTimer:
    """By the monotonic clock."""

    def __init__(self) -> None:
        self._start_s = self._end_s = time.perf_counter()

    def stop(self) -> None:
        self._end_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """It is over."""

    def elapsed_us(self) -> int:
        return int((self._end_s - self._start_s) * 1e6)


class CudaStreams:
    """The compute stream is the one that is current in torch; the swap stream is its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._swap = _cuda.Stream(device)

    @property
    def shares_memory(self) -> bool:
        return False

    def on_device(self) -> AbstractContextManager[object]:
        # Each thread has a device of its own, the first unless it says so.
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
        # Into pageable memory it would wait for all that the stream was asked before.
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class CudaMark:
    """An event of the device."""

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
    """By events of the device, so that nobody waits for it only to know what time it is."""

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
    """The streams of `device`."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


# -- Records what is asked of a GPU as CUDA graphs -------------------------------------------------

# Its streams and graphs have no types.


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
