"""Where the tokens of a request go: one Generate stream, or a Session shared by many."""

from __future__ import annotations

import asyncio
from typing import Protocol

from scheduler_service.codec import encode_finish, encode_scored
from scheduler_service.core.plan import ScoredToken
from scheduler_service.core.request import Request
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError


class Sink(Protocol):
    """Takes what happens to a request; `flush` ends a step."""

    def token(self, request: Request, token_id: int, scored: ScoredToken | None) -> None:
        """A new output token."""
        ...

    def prompt_logprobs(self, request: Request, scored: list[ScoredToken]) -> None:
        """Logprobs of the next prompt tokens."""
        ...

    def finish(self, request: Request) -> None:
        """The end of the request."""
        ...

    def flush(self) -> None:
        """Everything of this step has been said."""
        ...

    def fail(self, error: DomainError) -> None:
        """The stream is to end with `error`."""
        ...


class GenerateSink:
    """The stream of one Generate call. `queue` holds responses; None or an error ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[api.GenerateResponse | DomainError | None] = asyncio.Queue()

    def token(self, request: Request, token_id: int, scored: ScoredToken | None) -> None:
        """Queues a chunk of one token."""
        chunk = api.TokenChunk(token_ids=[token_id])
        if scored is not None:
            chunk.logprobs.append(encode_scored(scored))
        self.queue.put_nowait(api.GenerateResponse(request_id=request.request_id, tokens=chunk))

    def prompt_logprobs(self, request: Request, scored: list[ScoredToken]) -> None:
        """Queues a chunk without output tokens."""
        chunk = api.TokenChunk(prompt_logprobs=[encode_scored(token) for token in scored])
        self.queue.put_nowait(api.GenerateResponse(request_id=request.request_id, tokens=chunk))

    def finish(self, request: Request) -> None:
        """Queues the finish and ends the stream."""
        finish = encode_finish(request)
        self.queue.put_nowait(api.GenerateResponse(request_id=request.request_id, finish=finish))
        self.queue.put_nowait(None)

    def flush(self) -> None:
        """Nothing to do: every token was queued at once."""

    def fail(self, error: DomainError) -> None:
        """Ends the stream with `error`."""
        self.queue.put_nowait(error)


class SessionStream:
    """The stream of one Session. Collects a step's tokens into one message."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[api.SessionResponse | DomainError | None] = asyncio.Queue()
        self.request_ids: dict[int, str] = {}
        self._pending = api.SessionResponse()

    def add_token(self, handle: int, token_id: int) -> None:
        """Adds a plain token to this step's message."""
        self._pending.handles.append(handle)
        self._pending.token_ids.append(token_id)

    def add_event(self, event: api.SessionEvent) -> None:
        """Adds an event to this step's message."""
        self._pending.events.append(event)

    def send_event(self, event: api.SessionEvent) -> None:
        """Queues an event ahead of this step's message, whose tokens come before its events."""
        self.queue.put_nowait(api.SessionResponse(events=[event]))

    def flush(self) -> None:
        """Queues this step's message, if there is anything in it."""
        if self._pending.handles or self._pending.events:
            self.queue.put_nowait(self._pending)
            self._pending = api.SessionResponse()


class SessionSink:
    """One request of a Session."""

    def __init__(self, stream: SessionStream, handle: int) -> None:
        self._stream = stream
        self._handle = handle

    def token(self, request: Request, token_id: int, scored: ScoredToken | None) -> None:
        """Adds a token to this step's message."""
        if scored is None:
            self._stream.add_token(self._handle, token_id)
            return
        chunk = api.TokenChunk(token_ids=[token_id], logprobs=[encode_scored(scored)])
        self._stream.add_event(api.SessionEvent(handle=self._handle, tokens=chunk))

    def prompt_logprobs(self, request: Request, scored: list[ScoredToken]) -> None:
        """Queues prompt logprobs before this step's tokens."""
        chunk = api.TokenChunk(prompt_logprobs=[encode_scored(token) for token in scored])
        self._stream.send_event(api.SessionEvent(handle=self._handle, tokens=chunk))

    def finish(self, request: Request) -> None:
        """Adds the finish to this step's message and frees the handle."""
        del self._stream.request_ids[self._handle]
        self._stream.add_event(api.SessionEvent(handle=self._handle, finish=encode_finish(request)))

    def flush(self) -> None:
        """Ends the step for the whole session; the first of its sinks does the work."""
        self._stream.flush()

    def fail(self, error: DomainError) -> None:
        """Ends the stream with `error`."""
        self._stream.queue.put_nowait(error)
