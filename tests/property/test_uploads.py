"""Pinned memory that is used again, on a device that reads it as late as it may."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor_service.device import ALIGNMENT, HostStreams, IntegerArrays, Uploads, views

DEVICE = torch.device("cpu")


class LazyStream(HostStreams):
    """Reads the source of a copy when it gets there, and not before somebody waits for it.

    `loses_marks`: nobody does.
    """

    def __init__(self, *, loses_marks: bool = False) -> None:
        self.num_waits = self.num_copies = 0
        self.buffers: list[int] = []
        self._loses_marks = loses_marks
        self._copies: deque[tuple[int, Tensor, Tensor]] = deque()

    @property
    def shares_memory(self) -> bool:
        return False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.buffers.append(num_bytes)
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        self.num_copies += 1
        self._copies.append((self.num_copies, source, target))

    def mark(self) -> LazyMark:  # type: ignore[override]
        return LazyMark(self, self.num_copies)

    def wait(self, number: int) -> None:
        if self._loses_marks:
            return
        self.num_waits += not self.has_read(number)
        self.advance(number)

    def has_read(self, number: int) -> bool:
        """Whether it got as far as the copy of that number; so it says."""
        return self._loses_marks or not self._copies or self._copies[0][0] > number

    def advance(self, number: int) -> None:
        """Gets as far as the copy of that number."""
        while self._copies and self._copies[0][0] <= number:
            _, source, target = self._copies.popleft()
            target.copy_(source)


class LazyMark:
    """Behind so many copies."""

    def __init__(self, stream: LazyStream, number: int) -> None:
        self._stream, self._number = stream, number

    @property
    def is_over(self) -> bool:
        return self._stream.has_read(self._number)

    def wait(self) -> None:
        self._stream.wait(self._number)


# Sizes of longs and ints of a step, and how far the device gets before the next.
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3),
        st.lists(st.integers(0, 2000), max_size=3),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=24,
)
LARGE = 2**26
# A step may be larger, or there may be room for several.
SIZES = st.sampled_from((512, 4096, 30_016, LARGE))


def _send_all(
    steps: list[tuple[list[int], list[int], int]], stream: LazyStream, max_bytes: int
) -> bool:
    """Whether the device had all that was sent, at the end."""
    uploads, number = Uploads(DEVICE, stream, max_bytes), 0
    sent: list[tuple[np.ndarray, Tensor]] = []
    for longs, ints, progress in steps:
        numbers = IntegerArrays(
            [np.arange(size, dtype=np.int64) + 1000 * len(sent) for size in longs],
            [np.arange(size, dtype=np.int32) - 1000 * len(sent) for size in ints],
        )
        for arrays, tensors in zip(numbers.kinds, uploads.send(numbers), strict=True):
            sent += zip(arrays, tensors, strict=True)
        flags = np.arange(sum(ints) + 1) % 3 == 0
        sent.append((flags, uploads.send_array(flags)))
        number += progress
        stream.advance(number)
    stream.advance(stream.num_copies)
    return all(np.array_equal(array, tensor.numpy()) for array, tensor in sent)


@given(STEPS, SIZES)
def test_device_gets_what_was_sent_however_late_it_reads(
    steps: list[tuple[list[int], list[int], int]], max_bytes: int
) -> None:
    stream = LazyStream()
    assert _send_all(steps, stream, max_bytes)
    assert all(num_bytes <= max_bytes for num_bytes in stream.buffers)
    assert stream.buffers == sorted(set(stream.buffers))


def test_device_gets_something_else_when_nobody_waits_for_memory() -> None:
    """The property above sees memory that is written too early."""
    steps = [([4], [4], 0)] * 12
    assert _send_all(steps, LazyStream(), 512)
    assert not _send_all(steps, LazyStream(loses_marks=True), 512)


def test_host_waits_for_nothing_when_eight_steps_are_on_their_way() -> None:
    """However many copies they are, and some of them large."""
    stream = LazyStream()
    uploads, behind = Uploads(DEVICE, stream), deque[int]()
    for step in range(60):
        for size in (5, 900, 2, 30_000 if step % 8 == 0 else 64, *range(9)):
            uploads.send(IntegerArrays([np.arange(size + 1)], []))
        behind.append(stream.num_copies)
        if len(behind) > 8:
            stream.advance(behind.popleft())
    assert stream.num_waits == 0
    assert stream.buffers == [2**20]


def test_host_waits_for_the_oldest_only_when_all_room_is_taken() -> None:
    stream = LazyStream()
    uploads, numbers = Uploads(DEVICE, stream, 1024), IntegerArrays([np.arange(16)], [])
    for _ in range(8):
        uploads.send(numbers)
    assert stream.num_waits == 0
    uploads.send(numbers)
    assert stream.num_waits == 1
    assert stream.has_read(1)
    assert not stream.has_read(2)
    # Twice as much as one copy that is read already leaves free.
    uploads.send(IntegerArrays([np.arange(32)], []))
    assert stream.has_read(3)
    assert not stream.has_read(4)


def test_what_is_larger_than_the_bound_arrives_in_parts() -> None:
    stream = LazyStream()
    uploads, array = Uploads(DEVICE, stream, 4096), np.arange(19998, dtype=np.float32)
    array = array.reshape(9, -1)[:, ::2]
    tensor = uploads.send_array(array)
    (longs, _) = uploads.send(IntegerArrays([np.arange(4000), np.arange(3)], []))
    stream.advance(stream.num_copies)
    assert np.array_equal(tensor.numpy(), array)
    assert [np.array_equal(longs[0], np.arange(4000)), longs[1].tolist()] == [True, [0, 1, 2]]
    assert stream.buffers == [4096]
    assert stream.num_copies == 40 + 32 + 1


def test_all_arrays_of_a_step_are_one_copy_and_lie_where_kernels_want_them() -> None:
    stream = LazyStream()
    numbers = IntegerArrays(
        [np.arange(3), np.arange(4).reshape(2, 2)], [np.arange(5, dtype=np.int32)] * 2
    )
    longs, ints = Uploads(DEVICE, stream).send(numbers)
    assert stream.num_copies == 1
    start = longs[0].data_ptr()
    for tensor in (*longs, *ints):
        assert (tensor.data_ptr() - start) % ALIGNMENT == 0
    assert [tuple(tensor.shape) for tensor in longs] == [(3,), (2, 2)]
    assert {tensor.dtype for tensor in ints} == {torch.int32}


def test_nothing_is_copied_when_there_is_nothing() -> None:
    stream = LazyStream()
    longs, ints = Uploads(DEVICE, stream).send(IntegerArrays([np.empty(0, np.int64)], []))
    assert (longs[0].tolist(), ints, stream.num_copies) == ([], [], 0)


def test_memory_that_stays_is_written_over_when_a_step_is_sent_to_it() -> None:
    uploads, memory = Uploads(DEVICE, HostStreams()), torch.zeros(64, dtype=torch.uint8)
    for start in (5, 50):
        numbers = IntegerArrays([np.arange(start, start + 2)], [np.full(3, start, np.int32)])
        uploads.send_to(memory, numbers)
        longs, ints = views(memory, numbers)
        assert longs[0].tolist() == [start, start + 1]
        assert ints[0].tolist() == [start] * 3


def test_arrays_are_not_copied_when_the_device_reads_the_hosts_memory() -> None:
    array = np.arange(4)
    uploads = Uploads(DEVICE, HostStreams())
    ((tensor,), _) = uploads.send(IntegerArrays([array], []))
    assert tensor.data_ptr() == array.ctypes.data
    assert uploads.send_array(array).data_ptr() == array.ctypes.data


def test_memory_grows_when_a_step_is_larger() -> None:
    stream = LazyStream()
    uploads = Uploads(DEVICE, stream)
    uploads.send(IntegerArrays([np.arange(9)], []))
    ((tensor,), _) = uploads.send(IntegerArrays([np.arange(170_000)], []))
    stream.advance(2)
    assert np.array_equal(tensor.numpy(), np.arange(170_000))
    assert stream.buffers == [2**20, 2**21]
