"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from splitserve_client import SplitserveError
from splitserve_gateway.http.errors import api_error


@dataclass(frozen=True, slots=True)
class EventFormat:
    """How events are written. `end`: what follows the last. `is_named`: by their `type`."""

    end: bytes = b"data: [DONE]\n\n"
    is_named: bool = False

    def encode(self, content: object) -> bytes:
        """One event."""
        data = b"data: " + to_json(content) + b"\n\n"
        if self.is_named and isinstance(content, dict):
            return b"event: " + str(content.get("type", "error")).encode() + b"\n" + data
        return data


PLAIN_EVENTS = EventFormat()
NAMED_EVENTS = EventFormat(end=b"", is_named=True)
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def event_stream(
    events: AsyncGenerator[object, None], form: EventFormat = PLAIN_EVENTS
) -> Response:
    """Streams `events` as JSON, then `[DONE]`.

    The first is awaited before anything is sent, so what is refused has its own status. Raises what
    `events` raise before it.
    """
    first = await anext(events)
    return StreamingResponse(_encoded(first, events, form), 200, _HEADERS, "text/event-stream")


async def _encoded(
    first: object, rest: AsyncGenerator[object, None], form: EventFormat
) -> AsyncIterator[bytes]:
    try:
        yield form.encode(first)
        async for event in rest:
            yield form.encode(event)
    except SplitserveError as error:
        yield form.encode(api_error(error).body())
    finally:
        await rest.aclose()
    yield form.end
