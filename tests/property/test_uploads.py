"""Buffers that take turns, on a device that reads them as late as it may."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor_service.device.streams import HostStreams
from executor_service.device.uploads import ALIGNMENT, Numbers, Uploads, views

DEVICE = torch.device("cpu")


class LazyStream(HostStreams):
    """Reads the source of a copy when it gets there, and not before somebody waits for it.

    `loses_marks`: nobody does.
    """

    def __init__(self, *, loses_marks: bool = False) -> None:
        self.num_waits = self.num_copies = self.num_buffers = 0
        self._loses_marks = loses_marks
        self._copies: deque[tuple[int, Tensor, Tensor]] = deque()

    @property
    def shares_memory(self) -> bool:
        return False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.num_buffers += 1
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        self.num_copies += 1
        self._copies.append((self.num_copies, source, target))

    def mark(self) -> LazyMark:  # type: ignore[override]
        return LazyMark(self, self.num_copies)

    def wait(self, number: int) -> None:
        if self._loses_marks:
            return
        self.num_waits += bool(self._copies and self._copies[0][0] <= number)
        self.advance(number)

    def advance(self, number: int) -> None:
        """Gets as far as the copy of that number."""
        while self._copies and self._copies[0][0] <= number:
            _, source, target = self._copies.popleft()
            target.copy_(source)


class LazyMark:
    """Behind so many copies."""

    def __init__(self, stream: LazyStream, number: int) -> None:
        self._stream, self._number = stream, number

    def wait(self) -> None:
        self._stream.wait(self._number)


# Sizes of longs and ints of a step, and how far the device gets before the next.
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3),
        st.lists(st.integers(0, 20000), max_size=3),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=24,
)


def _send_all(steps: list[tuple[list[int], list[int], int]], stream: LazyStream) -> bool:
    """Whether the device had all that was sent, at the end."""
    uploads, number = Uploads(DEVICE, stream), 0
    sent: list[tuple[Numbers, tuple[list[Tensor], list[Tensor]]]] = []
    for longs, ints, progress in steps:
        numbers = Numbers(
            [np.arange(size, dtype=np.int64) + 1000 * len(sent) for size in longs],
            [np.arange(size, dtype=np.int32) - 1000 * len(sent) for size in ints],
        )
        sent.append((numbers, uploads.send(numbers)))
        number += progress
        stream.advance(number)
    stream.advance(stream.num_copies)
    return all(
        np.array_equal(array, tensor.numpy())
        for numbers, tensors in sent
        for arrays, of_kind in zip(numbers.kinds, tensors, strict=True)
        for array, tensor in zip(arrays, of_kind, strict=True)
    )


@given(STEPS)
def test_device_gets_what_was_sent_however_late_it_reads(
    steps: list[tuple[list[int], list[int], int]],
) -> None:
    assert _send_all(steps, LazyStream())


def test_device_gets_something_else_when_nobody_waits_for_a_buffer() -> None:
    """The property above sees a buffer that is written too early."""
    steps = [([4], [4], 0)] * 12
    assert _send_all(steps, LazyStream())
    assert not _send_all(steps, LazyStream(loses_marks=True))


def test_host_waits_for_nothing_when_three_steps_are_on_their_way() -> None:
    stream = LazyStream()
    uploads, numbers = Uploads(DEVICE, stream), Numbers([np.arange(5)], [])
    for copy in range(20):
        uploads.send(numbers)
        stream.advance(copy - 7)
    assert stream.num_waits == 0
    assert stream.num_copies == 20
    assert stream.num_buffers == 9


def test_all_arrays_of_a_step_are_one_copy_and_lie_where_kernels_want_them() -> None:
    stream = LazyStream()
    numbers = Numbers(
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
    longs, ints = Uploads(DEVICE, stream).send(Numbers([np.empty(0, np.int64)], []))
    assert (longs[0].tolist(), ints, stream.num_copies) == ([], [], 0)


def test_memory_that_stays_is_written_over_when_a_step_is_sent_to_it() -> None:
    uploads, memory = Uploads(DEVICE, HostStreams()), torch.zeros(64, dtype=torch.uint8)
    for start in (5, 50):
        numbers = Numbers([np.arange(start, start + 2)], [np.full(3, start, np.int32)])
        uploads.send_to(memory, numbers)
        longs, ints = views(memory, numbers)
        assert longs[0].tolist() == [start, start + 1]
        assert ints[0].tolist() == [start] * 3


def test_arrays_are_not_copied_when_the_device_reads_the_hosts_memory() -> None:
    array = np.arange(4)
    ((tensor,), _) = Uploads(DEVICE, HostStreams()).send(Numbers([array], []))
    assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("num_longs", [1, 70_000])
def test_buffers_grow_when_a_step_is_larger(num_longs: int) -> None:
    stream = LazyStream()
    uploads = Uploads(DEVICE, stream)
    uploads.send(Numbers([np.arange(9)], []))
    ((tensor,), _) = uploads.send(Numbers([np.arange(num_longs)], []))
    stream.advance(2)
    assert np.array_equal(tensor.numpy(), np.arange(num_longs))
