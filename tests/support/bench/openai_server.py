"""An OpenAI server without a network: what it answers, and when, is what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

Piece = tuple[float, bytes]


@dataclass(slots=True)
class Answer:
    """`pieces`: bytes, each after so many seconds. `error`: in place of what would come next."""

    pieces: Sequence[Piece] = ()
    status: int = 200
    error: Exception | None = None


@dataclass
class OpenAiServer(httpx2.AsyncBaseTransport):
    """`answer(n)`: to the request with number n. `bodies`: what was asked."""

    answer: Callable[[int], Answer]
    models: object = field(default_factory=lambda: {"data": [{"id": "some-model"}]})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[httpx2.Headers] = field(default_factory=list)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            status = 200 if self.models is not None else 404
            return httpx2.Response(status, json=self.models, request=request)
        self.headers.append(request.headers)
        self.bodies.append(json.loads(await request.aread()) | {"path": request.url.path})
        answer = self.answer(len(self.bodies) - 1)
        if answer.error is not None and not answer.pieces:
            raise answer.error
        return httpx2.Response(answer.status, stream=_Stream(answer))

    def client(self) -> httpx2.AsyncClient:
        """Speaks to it."""
        return httpx2.AsyncClient(transport=self, base_url="http://server/v1/")


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay_s, data in self._answer.pieces:
            await asyncio.sleep(delay_s)
            yield data
        if self._answer.error is not None:
            raise self._answer.error


def event(content: object) -> bytes:
    """One event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(said: str, finish: str | None = None, **more: object) -> bytes:
    """An event of a completion."""
    return event({"choices": [{"index": 0, "text": said, "finish_reason": finish}], **more})


def delta(finish: str | None = None, **said: object) -> bytes:
    """An event of a chat."""
    return event({"choices": [{"index": 0, "delta": said, "finish_reason": finish}]})


def usage(num_prompt: int, num_output: int, num_cached: int | None = None) -> dict[str, object]:
    """`usage` of a body or an event."""
    details = None if num_cached is None else {"cached_tokens": num_cached}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "prompt_tokens_details": details,
    }


def end(num_prompt: int, num_output: int, num_cached: int | None = None) -> bytes:
    """What ends a stream: the usage, and the last line."""
    counts = usage(num_prompt, num_output, num_cached)
    return event({"choices": [], "usage": counts}) + b"data: [DONE]\n\n"
