"""Messages that a session sends: submissions and aborts, from a stream's `Outgoing`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client.errors import InvalidRequest, SplitserveError
from splitserve_client.open_requests import OpenRequests, Outgoing

# Size that every server accepts.
_SMALL_MESSAGE_BYTES = 256 * 1024
# Tag and length of a submission in a message.
_FIELD_BYTES = 8


class SessionMessages:
    """Encodes the messages of a session."""

    def __init__(
        self,
        requests: OpenRequests,
        max_message_bytes: Callable[[], Awaitable[float]],
        fail: Callable[[int, SplitserveError], None],
    ) -> None:
        """Prepares the encoder.

        `fail`: ends the request with this handle, which the server would refuse.
        """
        self._open = requests
        self._max_message_bytes = max_message_bytes
        self._fail = fail

    async def over(self, outgoing: Outgoing) -> AsyncIterator[api.SessionRequest]:
        """Yields the messages to send.

        Skips requests that would make the server end the session.
        """
        while await outgoing.wait():
            if outgoing.to_abort:
                handle, _ = outgoing.to_abort.popitem()
                yield api.SessionRequest(abort=api.SessionAbort(handle=handle))
                continue
            handle = next(iter(outgoing.to_submit))
            submit = self._submission(handle)
            if submit is None or not await self._is_small_enough(handle, submit):
                continue
            if handle in outgoing.to_submit:
                self._sent(handle, outgoing)
                message = api.SessionRequest(submit=submit)
                if outgoing.takes_submissions:
                    self._add_submissions(message, outgoing)
                yield message

    def _add_submissions(self, message: api.SessionRequest, outgoing: Outgoing) -> None:
        """Adds further waiting submissions to `message` while it stays small."""
        num_bytes = message.ByteSize()
        for handle in list(outgoing.to_submit):
            submit = self._submission(handle)
            if submit is None:
                continue
            num_bytes += submit.ByteSize() + _FIELD_BYTES
            if num_bytes > _SMALL_MESSAGE_BYTES:
                return
            self._sent(handle, outgoing)
            message.submissions.append(submit)

    def _sent(self, handle: int, outgoing: Outgoing) -> None:
        del outgoing.to_submit[handle]
        self._open.wanted[handle].sent_over = outgoing

    def _submission(self, handle: int) -> api.SessionSubmit | None:
        """Encodes a request; ends the request and returns None if it cannot be encoded."""
        opened = self._open.wanted[handle]
        try:
            return api.SessionSubmit(
                handle=handle, request=opened.request.message(), credential=opened.credential
            )
        except (TypeError, ValueError, OverflowError) as error:
            self._fail(handle, InvalidRequest(f"the request cannot be encoded: {error}"))
            return None

    async def _is_small_enough(self, handle: int, submit: api.SessionSubmit) -> bool:
        """Returns whether the server accepts a request of this size; ends the request if not."""
        num_bytes = submit.ByteSize() + _FIELD_BYTES
        if num_bytes <= _SMALL_MESSAGE_BYTES or num_bytes <= await self._max_message_bytes():
            return True
        refusal = f"the request has {num_bytes} bytes, which is more than the server takes"
        if handle in self._open.wanted:
            self._fail(handle, InvalidRequest(refusal, "MESSAGE_TOO_LARGE"))
        return False
