"""Where the tokens of a request go: one Generate stream, or a Session shared by many."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from scheduler_service.core.plan import TokenEvent
from scheduler_service.core.request import Int32Array, Int64Array, Request, ScoredToken, Sequence
from scheduler_service.streams.client_codec import (
    encode_completion,
    encode_finish,
    encode_sequence_finish,
    encode_tokens,
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


class GenerateSink:
    """The stream of one Generate call."""

    def __init__(self, outbox: Outbox) -> None:
        self.number = 0
        self.outbox = outbox
        self.request_id = ""

    @property
    def stream(self) -> GenerateSink:
        """Itself."""
        return self

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        """Queues a chunk."""
        self._put(tokens=encode_tokens(token_ids.tolist(), ()))

    def token(self, event: TokenEvent) -> None:
        """Queues a chunk of one token."""
        self._put(tokens=_chunk(event))

    def prompt_logprobs(self, scored: list[ScoredToken]) -> None:
        """Queues a chunk without output tokens."""
        self._put(tokens=_prompt_chunk(scored))

    def finish_sequence(self, sequence: Sequence) -> None:
        """Queues the end of a sequence."""
        self._put(sequence_finish=encode_sequence_finish(sequence))

    def finish(self, request: Request) -> None:
        """Queues the finish and ends the stream."""
        for index, completion in enumerate(request.completions):
            chunk = encode_tokens(completion.token_ids, completion.scored, index)
            self._put(tokens=chunk)
            self._put(sequence_finish=encode_completion(completion, index))
        self._put(finish=encode_finish(request))
        self.outbox.end()

    def flush(self) -> None:
        """Nothing to do: everything was queued at once."""

    def _put(
        self,
        *,
        tokens: api.TokenChunk | None = None,
        sequence_finish: api.SequenceFinish | None = None,
        finish: api.Finish | None = None,
    ) -> None:
        self.outbox.put(
            api.GenerateResponse(
                request_id=self.request_id,
                tokens=tokens,
                sequence_finish=sequence_finish,
                finish=finish,
            )
        )


class SessionStream:
    """The stream of one Session. Collects what a step brings into one message."""

    def __init__(self, outbox: Outbox) -> None:
        self.number = 0
        self.outbox = outbox
        self.request_ids: dict[int, str] = {}
        self._pending = api.SessionResponse()
        self._is_half_closed = False

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        """Adds plain tokens to this step's message."""
        self._pending.handles.extend(handles.tolist())
        self._pending.token_ids.extend(token_ids.tolist())

    def add_event(self, event: api.SessionEvent) -> None:
        """Adds an event to this step's message."""
        self._pending.events.append(event)

    def send_event(self, event: api.SessionEvent) -> None:
        """Queues an event ahead of this step's message, whose tokens come before its events."""
        self.outbox.put(api.SessionResponse(events=[event]))

    def flush(self) -> None:
        """Queues this step's message, if there is anything in it."""
        if self._pending.handles or self._pending.events:
            self.outbox.put(self._pending)
            self._pending = api.SessionResponse()
        self._end_if_done()

    def half_close(self) -> None:
        """The client submits no more: ends the stream when all requests have ended."""
        self._is_half_closed = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_half_closed and not self.request_ids:
            self.outbox.end()


class SessionSink:
    """One request of a Session."""

    def __init__(self, stream: SessionStream, handle: int) -> None:
        self._stream = stream
        self._handle = handle

    @property
    def stream(self) -> SessionStream:
        """The session."""
        return self._stream

    def token(self, event: TokenEvent) -> None:
        """Adds a token to this step's message."""
        self._add(api.SessionEvent(handle=self._handle, tokens=_chunk(event)))

    def prompt_logprobs(self, scored: list[ScoredToken]) -> None:
        """Queues prompt logprobs before this step's tokens."""
        event = api.SessionEvent(handle=self._handle, tokens=_prompt_chunk(scored))
        self._stream.send_event(event)

    def finish_sequence(self, sequence: Sequence) -> None:
        """Adds the end of a sequence to this step's message."""
        finish = encode_sequence_finish(sequence)
        self._add(api.SessionEvent(handle=self._handle, sequence_finish=finish))

    def finish(self, request: Request) -> None:
        """Adds the finish to this step's message and frees the handle."""
        handle = self._handle
        del self._stream.request_ids[handle]
        for index, completion in enumerate(request.completions):
            chunk = encode_tokens(completion.token_ids, completion.scored, index)
            self._add(api.SessionEvent(handle=handle, tokens=chunk))
            finish = encode_completion(completion, index)
            self._add(api.SessionEvent(handle=handle, sequence_finish=finish))
        self._add(api.SessionEvent(handle=handle, finish=encode_finish(request)))

    def _add(self, event: api.SessionEvent) -> None:
        self._stream.add_event(event)


def _chunk(event: TokenEvent) -> api.TokenChunk:
    scored = () if event.scored is None else (event.scored,)
    return encode_tokens((event.token_id,), scored, event.sequence.index)


def _prompt_chunk(scored: list[ScoredToken]) -> api.TokenChunk:
    return api.TokenChunk(prompt_logprobs=encode_tokens((), scored).logprobs)
