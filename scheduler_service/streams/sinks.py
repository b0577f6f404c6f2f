"""Where the tokens of a request go: one Generate stream, or a Session shared by many."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values.plan import TokenEvent
from scheduler_service.scheduler.values.request import (
    Int32Array,
    Int64Array,
    Request,
    ScoredToken,
    Sequence,
)
from scheduler_service.streams.client_codec import (
    encode_completion,
    encode_completion_finish,
    encode_finish,
    encode_prompt_scores,
    encode_sequence_finish,
    encode_token,
)
from scheduler_service.streams.outbox import Outbox
from splitserve.scheduler.v1 import scheduler_pb2 as api

_HANDLE_BITS = 32


def client_key(stream_number: int, handle: int) -> int:
    """The key of a request in the core: its stream, and its handle there."""
    return stream_number << _HANDLE_BITS | (handle & (1 << _HANDLE_BITS) - 1)


def split_keys(keys: Int64Array) -> tuple[Int64Array, Int32Array]:
    """The stream numbers and handles of keys."""
    return keys >> _HANDLE_BITS, keys.astype(np.int32)


class Stream(Protocol):
    """Takes the plain tokens of a step, for any of its requests; `flush` ends the step.

    `number`: given when it is opened.
    """

    number: int

    @property
    def outbox(self) -> Outbox:
        """What it has still to send."""
        ...

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        """Request `handles[i]` got `token_ids[i]`."""
        ...

    def flush(self) -> None:
        """Everything of this step has been said."""
        ...


class Sink(Protocol):
    """Takes what else happens to a request, and is flushed through its stream."""

    @property
    def stream(self) -> Stream:
        """The stream it writes to."""
        ...

    def token(self, event: TokenEvent) -> None:
        """A new output token with scores, or of one of several sequences."""
        ...

    def prompt_logprobs(self, scored: list[ScoredToken]) -> None:
        """Logprobs of the next prompt tokens."""
        ...

    def finish_sequence(self, sequence: Sequence) -> None:
        """The end of one of several sequences."""
        ...

    def finish(self, request: Request) -> None:
        """The end of the request; brings what was not streamed."""
        ...


class EventStream(Stream, Protocol):
    """A stream of messages, of which each is about one request: `handle`."""

    def put_first(self, handle: int, tokens: api.TokenChunk) -> None:
        """Comes before the plain tokens of this step."""
        ...

    def put(
        self,
        handle: int,
        *,
        tokens: api.TokenChunk | None = None,
        sequence_finish: api.SequenceFinish | None = None,
    ) -> None:
        """Comes after them, in the order of the calls."""
        ...

    def end(self, handle: int, finish: api.Finish) -> None:
        """The last of a request; its handle is free."""
        ...


class RequestSink:
    """One request of a stream."""

    def __init__(self, stream: EventStream, handle: int) -> None:
        self.stream = stream
        self._handle = handle

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
    """The stream of one Generate call, which has one request. Everything is queued at once."""

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
    """The stream of one Session. Collects what a step brings into one message.

    What several steps bring is sent as one message if it waits, with all tokens before all events:
    so nothing is joined to events that tokens of the same request may follow. `names`: of its
    unfinished requests, by handle; `begin` adds to it.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.number = 0
        self.outbox = outbox
        self.names: dict[int, RequestName] = {}
        # What the first step brings says what the stream takes.
        self._pending = api.SessionResponse(takes_submissions=True)
        self._has_only_ends = True
        # Handles that are free again, which clients may not have been told yet.
        self._freed: set[int] = set()
        self._is_half_closed = False

    def begin(self, handle: int, name: RequestName) -> None:
        """Takes a request under a handle that is free."""
        if handle in self._freed:
            # Its client has not waited for the end of the one before.
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
        """Queues a refusal."""
        self._send(api.SessionEvent(handle=handle, rejected=rejection))

    def flush(self) -> None:
        if self._pending.handles or self._pending.events:
            self.outbox.put(self._pending, joins_next=self._has_only_ends)
            self._pending, self._has_only_ends = api.SessionResponse(), True
        self._end_if_done()

    def half_close(self) -> None:
        """The client submits no more: ends the stream when all requests have ended."""
        self._is_half_closed = True
        self._end_if_done()

    def _send(self, event: api.SessionEvent) -> None:
        """Queues an event ahead of this step's message, whose tokens come before its events."""
        self.outbox.put(api.SessionResponse(events=[event]))

    def _end_if_done(self) -> None:
        if self._is_half_closed and not self.names:
            self.outbox.end()
