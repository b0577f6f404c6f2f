"""Delivery of step events to the client streams of their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from scheduler_service.scheduler.values import Int32Array, Request, StepEvents
from scheduler_service.streams.outbox import Outbox, UnreadLimits
from scheduler_service.streams.sinks import Sink, Stream, split_keys
from splitserve_contract import DomainError


class Delivery:
    """Open `streams` by number, and `sinks` of their unfinished requests by request id.

    Events of unknown or closed requests and streams are dropped. `on_unread` is called with each
    stream that holds too many unread bytes, and closes its outbox.
    """

    def __init__(self, unread: UnreadLimits, on_unread: Callable[[Stream], object]) -> None:
        self.unread = unread
        self._on_unread = on_unread
        self.streams: dict[int, Stream] = {}
        self._last_stream_number = 0
        self.sinks: dict[str, Sink] = {}
        self._request_ids: dict[int, set[str]] = {}

    def new_outbox(self) -> Outbox:
        """Returns an outbox for a stream that is about to be opened."""
        return Outbox(self.unread)

    def open_stream(self, stream: Stream) -> None:
        """Registers a stream for plain tokens and sets its number, the one in `client_key`."""
        self._last_stream_number += 1
        stream.number = self._last_stream_number
        self.streams[stream.number] = stream
        self._request_ids[stream.number] = set()

    def close_stream(self, stream: Stream) -> None:
        """Forgets an open stream whose client is gone; none of its requests may be left."""
        del self.streams[stream.number], self._request_ids[stream.number]

    def requests_of(self, stream: Stream) -> list[str]:
        """Returns ids of the unfinished requests of a stream; none if the stream is not open."""
        return list(self._request_ids.get(stream.number, ()))

    def expect(self, request_id: str, sink: Sink) -> None:
        """Registers the sink of a request, for all events but plain tokens.

        The stream of the sink must be open.
        """
        self._request_ids[sink.stream.number].add(request_id)
        self.sinks[request_id] = sink

    def forget(self, request_id: str) -> Sink | None:
        """Drops the sink of a request, which gets no more events; returns the sink, if any."""
        sink = self.sinks.pop(request_id, None)
        if sink is not None:
            self._request_ids[sink.stream.number].discard(request_id)
        return sink

    def fail(self, request_id: str, error: DomainError) -> None:
        """Ends the stream of a request with `error`."""
        if sink := self.forget(request_id):
            sink.stream.outbox.end(error)

    def finish(self, request: Request) -> None:
        """Delivers the end of one request and flushes its stream."""
        if sink := self.forget(request.request_id):
            sink.finish(request)
            self.flush([sink.stream])

    def deliver(self, events: StepEvents) -> None:
        """Delivers the events of a step; each stream gets its events in one flush."""
        touched: dict[int, Stream] = {}
        for request, scored in events.prompt_logprobs:
            if sink := self.sinks.get(request.request_id):
                sink.prompt_logprobs(list(scored))
                touched[id(sink.stream)] = sink.stream
        self._deliver_plain(events, touched)
        for event in events.tokens:
            if sink := self.sinks.get(event.sequence.request.request_id):
                sink.token(event)
                touched[id(sink.stream)] = sink.stream
        for sequence in events.finished_sequences:
            if sink := self.sinks.get(sequence.request.request_id):
                sink.finish_sequence(sequence)
                touched[id(sink.stream)] = sink.stream
        for request in events.finished:
            if sink := self.forget(request.request_id):
                sink.finish(request)
                touched[id(sink.stream)] = sink.stream
        self.flush(touched.values())

    def flush(self, streams: Iterable[Stream]) -> None:
        """Flushes `streams` after a step; reports streams that hold too many unread bytes.

        If all streams together hold too much, reports the largest streams first.
        """
        for stream in streams:
            stream.flush()
            if stream.outbox.is_unread():
                self._on_unread(stream)
        while self.unread.is_too_much:
            self._on_unread(max(self.streams.values(), key=lambda stream: stream.outbox.num_bytes))

    def _deliver_plain(self, events: StepEvents, touched: dict[int, Stream]) -> None:
        """Divides the plain tokens of a step among streams; adds these to `touched`."""
        if len(events.client_keys) == 0:
            return
        numbers, handles = split_keys(events.client_keys)
        first = int(numbers[0])
        if np.count_nonzero(numbers == first) == len(numbers):
            # The usual case: a gateway has all of its requests in one stream.
            self._deliver_to(first, handles, events.token_ids, touched)
            return
        order = np.argsort(numbers, kind="stable")
        numbers, handles, token_ids = numbers[order], handles[order], events.token_ids[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for start, end in pairwise([*starts, len(numbers)]):
            of_stream = handles[start:end], token_ids[start:end]
            self._deliver_to(int(numbers[start]), *of_stream, touched)

    def _deliver_to(
        self, number: int, handles: Int32Array, token_ids: Int32Array, touched: dict[int, Stream]
    ) -> None:
        """Delivers plain tokens to one stream, unless it is closed by now."""
        stream = self.streams.get(number)
        if stream is not None:
            stream.plain_tokens(handles, token_ids)
            touched[id(stream)] = stream
