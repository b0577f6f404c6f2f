"""What happened in a step, taken to the streams of those who asked."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import Request
from scheduler_service.sinks import Sink, Stream, split_keys
from splitserve_rpc.domain_error import DomainError


class Delivery:
    """The open streams, and the sinks of unfinished requests.

    Events of requests and streams that are not here, or no longer, are nobody's and dropped.
    """

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._last_stream_number = 0
        self._sinks: dict[str, Sink] = {}

    def open_stream(self, stream: Stream) -> int:
        """Registers where plain tokens go; returns the number for `client_key`."""
        self._last_stream_number += 1
        self._streams[self._last_stream_number] = stream
        return self._last_stream_number

    def close_stream(self, number: int) -> None:
        """Nobody listens there any more."""
        del self._streams[number]

    def expect(self, request_id: str, sink: Sink) -> None:
        """Registers where everything else about a request goes."""
        self._sinks[request_id] = sink

    def sink(self, request_id: str) -> Sink | None:
        """Where a request's events go."""
        return self._sinks.get(request_id)

    def forget(self, request_id: str) -> None:
        """Nobody is to be told anything about a request any more."""
        self._sinks.pop(request_id, None)

    def fail(self, request_id: str, error: DomainError) -> None:
        """Ends the stream of a request with `error`."""
        if sink := self._sinks.pop(request_id, None):
            sink.fail(error)

    def finish(self, request: Request) -> None:
        """Tells of one request that it has ended."""
        if sink := self._sinks.pop(request.request_id, None):
            sink.finish(request)
            sink.stream.flush()

    def deliver(self, events: StepEvents) -> None:
        """Tells everybody what a step brought; each stream gets it in one piece."""
        for request, scored in events.prompt_logprobs:
            if sink := self._sinks.get(request.request_id):
                sink.prompt_logprobs(list(scored))
        touched = self._deliver_plain(events)
        for event in events.tokens:
            if sink := self._sinks.get(event.sequence.request.request_id):
                sink.token(event)
                touched[id(sink.stream)] = sink.stream
        for sequence in events.finished_sequences:
            if sink := self._sinks.get(sequence.request.request_id):
                sink.finish_sequence(sequence)
                touched[id(sink.stream)] = sink.stream
        for request in events.finished:
            if sink := self._sinks.pop(request.request_id, None):
                sink.finish(request)
                touched[id(sink.stream)] = sink.stream
        for stream in touched.values():
            stream.flush()

    def _deliver_plain(self, events: StepEvents) -> dict[int, Stream]:
        """Divides the plain tokens of a step among the streams; returns those that got some."""
        touched: dict[int, Stream] = {}
        if len(events.client_keys) == 0:
            return touched
        numbers, handles = split_keys(events.client_keys)
        order = np.argsort(numbers, kind="stable")
        numbers, handles, token_ids = numbers[order], handles[order], events.token_ids[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for start, end in pairwise([*starts, len(numbers)]):
            stream = self._streams.get(int(numbers[start]))
            if stream is not None:
                stream.plain_tokens(handles[start:end], token_ids[start:end])
                touched[id(stream)] = stream
        return touched
