"""What a session sends: submissions and aborts, in the order of a stream's `Outgoing`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client.errors import InvalidRequest, SplitserveError
from splitserve_client.open_requests import OpenRequests, Outgoing

# Every server takes a message of this size.
_SMALL_MESSAGE_BYTES = 256 * 1024


class SessionMessages:
    """Makes the messages of a session."""

    def __init__(
        self,
        requests: OpenRequests,
        max_message_bytes: Callable[[], Awaitable[float]],
        fail: Callable[[int, SplitserveError], None],
    ) -> None:
        """`fail`: ends the request with this handle, which the server would not take."""
        self._open = requests
        self._max_message_bytes = max_message_bytes
        self._fail = fail

    async def over(self, outgoing: Outgoing) -> AsyncIterator[api.SessionRequest]:
        """What is to be sent, but for what would end the session of all the others."""
        while await outgoing.wait():
            if outgoing.to_abort:
                handle, _ = outgoing.to_abort.popitem()
                yield api.SessionRequest(abort=api.SessionAbort(handle=handle))
                continue
            handle = next(iter(outgoing.to_submit))
            try:
                message = self._submission(handle)
            except (TypeError, ValueError, OverflowError) as error:
                self._fail(handle, InvalidRequest(f"the request cannot be encoded: {error}"))
                continue
            if await self._is_small_enough(handle, message) and handle in outgoing.to_submit:
                del outgoing.to_submit[handle]
                self._open.wanted[handle].sent_over = outgoing
                yield message

    def _submission(self, handle: int) -> api.SessionRequest:
        opened = self._open.wanted[handle]
        submit = api.SessionSubmit(
            handle=handle, request=opened.request.message(), credential=opened.credential
        )
        return api.SessionRequest(submit=submit)

    async def _is_small_enough(self, handle: int, message: api.SessionRequest) -> bool:
        """Ends the request if not."""
        num_bytes = message.ByteSize()
        if num_bytes <= _SMALL_MESSAGE_BYTES or num_bytes <= await self._max_message_bytes():
            return True
        refusal = f"the request has {num_bytes} bytes, which is more than the server takes"
        if handle in self._open.wanted:
            self._fail(handle, InvalidRequest(refusal, "MESSAGE_TOO_LARGE"))
        return False
