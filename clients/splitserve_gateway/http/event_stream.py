"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from splitserve_client import SplitserveError
from splitserve_gateway.http.errors import api_error

_DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def event_stream(events: AsyncGenerator[object, None]) -> Response:
    """Streams `events` as JSON, then `[DONE]`.

    The first is awaited before anything is sent, so what is refused has its own status. Raises what
    `events` raise before it.
    """
    first = await anext(events)
    return StreamingResponse(_encoded(first, events), 200, _HEADERS, "text/event-stream")


async def _encoded(first: object, rest: AsyncGenerator[object, None]) -> AsyncIterator[bytes]:
    try:
        yield _event(first)
        async for event in rest:
            yield _event(event)
    except SplitserveError as error:
        yield _event(api_error(error).body())
    finally:
        await rest.aclose()
    yield _DONE


def _event(content: object) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
