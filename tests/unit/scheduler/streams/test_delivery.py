"""Plain tokens of a step reach the streams that they are for, however many there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.values import Int32Array, StepEvents
from scheduler_service.streams import Delivery, Outbox, UnreadLimits, client_key

NUM_STREAMS = 3
# Which stream, which of its requests, which token.
Plain = tuple[int, int, int]


class _Told:
    """A stream that keeps what it is told. `flushes`: how often a step ended."""

    def __init__(self, outbox: Outbox) -> None:
        self.number = 0
        self.outbox = outbox
        self.tokens: list[tuple[int, int]] = []
        self.flushes = 0

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        self.tokens += zip(handles.tolist(), token_ids.tolist(), strict=True)

    def flush(self) -> None:
        self.flushes += 1


def _deliver(tokens: list[Plain], closed: set[int]) -> list[_Told]:
    delivery = Delivery(UnreadLimits(1000, 1000), lambda stream: pytest.fail(f"{stream} is closed"))
    streams = [_Told(delivery.new_outbox()) for _ in range(NUM_STREAMS)]
    for stream in streams:
        delivery.open_stream(stream)
    for index in closed:
        delivery.close_stream(streams[index])
    keys = [client_key(streams[index].number, handle) for index, handle, _ in tokens]
    token_ids = [token_id for _, _, token_id in tokens]
    delivery.deliver(StepEvents(np.array(keys, np.int64), np.array(token_ids, np.int32)))
    return streams


@given(
    tokens=st.lists(
        st.tuples(st.integers(0, NUM_STREAMS - 1), st.integers(0, 3), st.integers(0, 99))
    ),
    closed=st.sets(st.integers(0, NUM_STREAMS - 1)),
)
def test_delivery_gives_each_open_stream_its_tokens_in_order(
    tokens: list[Plain], closed: set[int]
) -> None:
    for index, stream in enumerate(_deliver(tokens, closed)):
        expected = [(handle, token) for number, handle, token in tokens if number == index]
        assert stream.tokens == ([] if index in closed else expected)
        assert stream.flushes == bool(stream.tokens)


@pytest.mark.parametrize("closed", [set(), {1}])
def test_delivery_of_one_stream_asks_no_other(closed: set[int]) -> None:
    streams = _deliver([(1, 0, 7), (1, 2, 8), (1, 0, 9)], closed)
    assert streams[1].tokens == ([] if closed else [(0, 7), (2, 8), (0, 9)])
    assert [stream.flushes for stream in streams] == [0, 0 if closed else 1, 0]
