"""What happened in a step, taken to the streams of those who asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from scheduler_service.scheduler.values.plan import StepEvents
from scheduler_service.scheduler.values.request import Int32Array, Request
from scheduler_service.streams.outbox import Outbox, Unread
from scheduler_service.streams.sinks import Sink, Stream, split_keys
from splitserve_rpc.domain_error import DomainError


class Delivery:
    """The open `streams` by number, and the `sinks` of their unfinished requests by request id.

    Events of requests and streams that are not here, or no longer, are nobody's and dropped.
    `on_unread` is told which streams hold too much that is not read, and closes their outboxes.
    """

    def __init__(self, unread: Unread, on_unread: Callable[[Stream], object]) -> None:
        self.unread = unread
        self._on_unread = on_unread
        self.streams: dict[int, Stream] = {}
        self._last_stream_number = 0
        self.sinks: dict[str, Sink] = {}
        self._request_ids: dict[int, set[str]] = {}

    def new_outbox(self) -> Outbox:
        """For a stream that is to be opened."""
        return Outbox(self.unread)

    def open_stream(self, stream: Stream) -> None:
        """Registers where plain tokens go, under a number for `client_key`."""
        self._last_stream_number += 1
        stream.number = self._last_stream_number
        self.streams[stream.number] = stream
        self._request_ids[stream.number] = set()

    def close_stream(self, stream: Stream) -> None:
        """Nobody listens there any more, and none of its requests is left."""
        del self.streams[stream.number], self._request_ids[stream.number]

    def requests_of(self, stream: Stream) -> list[str]:
        """The unfinished requests of a stream; none if it is not open."""
        return list(self._request_ids.get(stream.number, ()))

    def expect(self, request_id: str, sink: Sink) -> None:
        """Registers where everything else about a request goes, whose stream is open."""
        self._request_ids[sink.stream.number].add(request_id)
        self.sinks[request_id] = sink

    def forget(self, request_id: str) -> Sink | None:
        """Nobody is to be told anything about a request any more; returns who was."""
        sink = self.sinks.pop(request_id, None)
        if sink is not None:
            self._request_ids[sink.stream.number].discard(request_id)
        return sink

    def fail(self, request_id: str, error: DomainError) -> None:
        """Ends the stream of a request with `error`."""
        if sink := self.forget(request_id):
            sink.stream.outbox.end(error)

    def finish(self, request: Request) -> None:
        """Tells of one request that it has ended."""
        if sink := self.forget(request.request_id):
            sink.finish(request)
            self.flush([sink.stream])

    def deliver(self, events: StepEvents) -> None:
        """Tells everybody what a step brought; each stream gets it in one piece."""
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
        """Everything was said to `streams` for now; tells of those that hold too much."""
        for stream in streams:
            stream.flush()
            if stream.outbox.is_unread():
                self._on_unread(stream)
        while self.unread.is_too_much:
            self._on_unread(max(self.streams.values(), key=lambda stream: stream.outbox.num_bytes))

    def _deliver_plain(self, events: StepEvents, touched: dict[int, Stream]) -> None:
        """Divides the plain tokens of a step among the streams; adds those that got some."""
        if len(events.client_keys) == 0:
            return
        numbers, handles = split_keys(events.client_keys)
        first = int(numbers[0])
        if np.count_nonzero(numbers == first) == len(numbers):
            # As a rule: a gateway has all of its requests in one stream.
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
        """Plain tokens of one stream, which may be closed by now."""
        stream = self.streams.get(number)
        if stream is not None:
            stream.plain_tokens(handles, token_ids)
            touched[id(stream)] = stream
