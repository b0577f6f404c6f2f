"""Sinks of requests and the client streams behind them: a Generate call, or a shared Session."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values import (
    Int32Array,
    Int64Array,
    Request,
    ScoredToken,
    Sequence,
    TokenEvent,
)
from scheduler_service.streams.client_codec import (
    encode_completion,
    encode_completion_finish,
    encode_finish,
    encode_output,
    encode_prompt_scores,
    encode_sequence_finish,
    encode_token,
)
from scheduler_service.streams.outbox import Outbox
from splitserve.scheduler.v1 import scheduler_pb2 as api

_HANDLE_BITS = 32


def client_key(stream_number: int, handle: int) -> int:
    """Returns the scheduler's key of a request: its stream's number and its handle there."""
    return stream_number << _HANDLE_BITS | (handle & (1 << _HANDLE_BITS) - 1)


def split_keys(keys: Int64Array) -> tuple[Int64Array, Int32Array]:
    """Returns the stream numbers and the handles of keys."""
    return keys >> _HANDLE_BITS, keys.astype(np.int32)


class Stream(Protocol):
    """Client stream that takes the plain tokens of its requests; `flush` ends a step.

    `number`: assigned when the stream is opened.
    """

    number: int

    @property
    def outbox(self) -> Outbox:
        """Outbox of messages that the stream has still to send."""
        ...

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        """Adds tokens: request `handles[i]` got `token_ids[i]`."""
        ...

    def flush(self) -> None:
        """Ends the step: queues the messages that the stream has collected."""
        ...


class Sink(Protocol):
    """Receiver of all other events of a request, flushed through its stream."""

    @property
    def stream(self) -> Stream:
        """Stream to which the sink writes."""
        ...

    def repeat_output(self, request: Request) -> None:
        """Adds the output that the request begins with, before all other events."""
        ...

    def token(self, event: TokenEvent) -> None:
        """Adds a new output token with scores, or of one of several sequences."""
        ...

    def prompt_logprobs(self, scored: list[ScoredToken]) -> None:
        """Adds logprobs of the next prompt tokens."""
        ...

    def finish_sequence(self, sequence: Sequence) -> None:
        """Adds the end of one of several sequences."""
        ...

    def finish(self, request: Request) -> None:
        """Adds the end of the request, with completions that were not streamed."""
        ...


class EventStream(Stream, Protocol):
    """Stream of messages, each about one request: `handle`."""

    def put_first(self, handle: int, tokens: api.TokenChunk) -> None:
        """Adds tokens that come before the plain tokens of this step."""
        ...

    def put(
        self,
        handle: int,
        *,
        tokens: api.TokenChunk | None = None,
        sequence_finish: api.SequenceFinish | None = None,
    ) -> None:
        """Adds tokens or an end that come after the plain tokens, in the order of the calls."""
        ...

    def end(self, handle: int, finish: api.Finish) -> None:
        """Adds the last message of a request; frees its handle."""
        ...


class RequestSink:
    """Sink of one request of a stream."""

    def __init__(self, stream: EventStream, handle: int) -> None:
        self.stream = stream
        self._handle = handle

    def repeat_output(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.num_output_tokens:
                self.stream.put_first(self._handle, encode_output(sequence))

    def token(self, event: TokenEvent) -> None:
        self.stream.put(self._handle, tokens=encode_token(event))

    def prompt_logprobs(self, scored: list[ScoredToken]) -> None:
        self.stream.put_first(self._handle, encode_prompt_scores(scored))

    def finish_sequence(self, sequence: Sequence) -> None:
        self.stream.put(self._handle, sequence_finish=encode_sequence_finish(sequence))

    def finish(self, request: Request) -> None:
        for index, completion in enumerate(request.completions):
            self.stream.put(self._handle, tokens=encode_completion(completion, index))
            finish = encode_completion_finish(completion, index)
            self.stream.put(self._handle, sequence_finish=finish)
        self.stream.end(self._handle, encode_finish(request))


class GenerateStream:
    """Stream of one Generate call, which has one request. Every message is queued at once."""

    def __init__(self, outbox: Outbox) -> None:
        self.number = 0
        self.outbox = outbox
        self.request_id = ""

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        tokens = api.TokenChunk(token_ids=token_ids.tolist())
        self._queue(api.GenerateResponse(tokens=tokens))

    def put_first(self, handle: int, tokens: api.TokenChunk) -> None:
        self._queue(api.GenerateResponse(tokens=tokens))

    def put(
        self,
        handle: int,
        *,
        tokens: api.TokenChunk | None = None,
        sequence_finish: api.SequenceFinish | None = None,
    ) -> None:
        self._queue(api.GenerateResponse(tokens=tokens, sequence_finish=sequence_finish))

    def end(self, handle: int, finish: api.Finish) -> None:
        self._queue(api.GenerateResponse(finish=finish))
        self.outbox.end()

    def flush(self) -> None:
        pass

    def _queue(self, response: api.GenerateResponse) -> None:
        response.request_id = self.request_id
        self.outbox.put(response)


class SessionStream:
    """Stream of one Session. Collects the events of a step into one message.

    If messages of several steps wait, they are sent as one, with all tokens before all events. So a
    message with events is joined to the next one only if its events are ends: tokens of the same
    request cannot follow those. `names`: names of the unfinished requests by handle; `begin` adds
    one.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.number = 0
        self.outbox = outbox
        self.names: dict[int, RequestName] = {}
        # The first message tells the client that the stream takes submissions.
        self._pending = api.SessionResponse(takes_submissions=True)
        self._has_only_ends = True
        # Free handles of ended requests, of which clients may not have been told yet.
        self._freed: set[int] = set()
        self._is_half_closed = False

    def begin(self, handle: int, name: RequestName) -> None:
        """Registers a request under a free handle."""
        if handle in self._freed:
            # The client reuses the handle before it has read the end of the earlier request.
            self.outbox.seal()
        self.names[handle] = name

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        self._pending.handles.extend(handles.tolist())
        self._pending.token_ids.extend(token_ids.tolist())

    def put_first(self, handle: int, tokens: api.TokenChunk) -> None:
        self._send(api.SessionEvent(handle=handle, tokens=tokens))

    def put(
        self,
        handle: int,
        *,
        tokens: api.TokenChunk | None = None,
        sequence_finish: api.SequenceFinish | None = None,
    ) -> None:
        self._has_only_ends = False
        self._pending.events.add(handle=handle, tokens=tokens, sequence_finish=sequence_finish)

    def end(self, handle: int, finish: api.Finish) -> None:
        del self.names[handle]
        if self.outbox.is_empty and not self._pending.events:
            self._freed.clear()
        self._freed.add(handle)
        self._pending.events.add(handle=handle, finish=finish)

    def reject(self, handle: int, rejection: api.RequestError) -> None:
        """Queues the refusal of a request."""
        self._send(api.SessionEvent(handle=handle, rejected=rejection))

    def flush(self) -> None:
        if self._pending.handles or self._pending.events:
            self.outbox.put(self._pending, joins_next=self._has_only_ends)
            self._pending, self._has_only_ends = api.SessionResponse(), True
        self._end_if_done()

    def half_close(self) -> None:
        """Notes that the client submits no more: the stream ends when all requests have ended."""
        self._is_half_closed = True
        self._end_if_done()

    def _send(self, event: api.SessionEvent) -> None:
        """Queues an event ahead of this step's message, whose tokens come before its events."""
        self.outbox.put(api.SessionResponse(events=[event]))

    def _end_if_done(self) -> None:
        if self._is_half_closed and not self.names:
            self.outbox.end()
