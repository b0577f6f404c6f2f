"""Generate call that is resumed after its stream broke."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from splitserve_client.connection import Connection
from splitserve_client.errors import RequestIdInUse, ServerUnreachable, SplitserveError
from splitserve_client.resumable_request import ResumableRequest
from splitserve_client.resumption import Backoff
from splitserve_client.types import Finish, Tokens


async def stream_resumed(
    connection: Connection, request: ResumableRequest, backoff: Backoff
) -> AsyncGenerator[Tokens | Finish, None]:
    """Streams the events of `request` up to its Finish.

    Closing the iterator aborts the request. Raises SplitserveError.
    """
    await connection.connect()
    while True:
        try:
            async with aclosing(_attempt(connection, request, backoff.remaining_s())) as events:
                async for event in events:
                    backoff.reset()
                    yield event
                    if isinstance(event, Finish):
                        return
            lost: SplitserveError = ServerUnreachable("the stream ended without a finish")
        except SplitserveError as error:
            lost = error
        if not request.may_go_on(lost):
            raise lost
        if isinstance(lost, RequestIdInUse):
            # The server has not noticed yet that the stream broke.
            with suppress(SplitserveError):
                await connection.abort(request.request_id)
        await backoff.pause(lost)


async def _attempt(
    connection: Connection, request: ResumableRequest, timeout_s: float | None
) -> AsyncGenerator[Tokens | Finish, None]:
    responses = connection.stream(
        lambda stubs: stubs.scheduler.Generate, request.message(), timeout_s
    )
    async with aclosing(responses):
        async for response in responses:
            for event in request.receive(response):
                yield event
