"""Unfinished requests of a session, and the messages that its streams have still to send."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from splitserve_client.resumable_request import ResumableRequest
from splitserve_client.resumption import Backoff
from splitserve_client.session_request import SessionRequest


class Outgoing:
    """Handles that one stream has still to send, each once: aborting an unsent request removes it.

    `left`: set once no more requests are submitted over the stream; its requests continue there.
    `takes_submissions`: the server accepts several submissions in one message.
    """

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.takes_submissions = False
        self.to_submit: dict[int, None] = {}
        self.to_abort: dict[int, None] = {}
        self._is_changed = asyncio.Event()
        self._is_over = False

    def submit(self, handle: int) -> None:
        """Queues the submission of a request."""
        self.to_submit[handle] = None
        self._is_changed.set()

    def abort(self, handle: int) -> None:
        """Queues the abort of a request."""
        self.to_abort[handle] = None
        self._is_changed.set()

    def leave(self) -> None:
        """Stops submissions over this stream."""
        self.to_submit.clear()
        self.left.set()

    def end(self) -> None:
        """Marks the stream as ended; drops all unsent messages."""
        self.to_submit.clear()
        self.to_abort.clear()
        self._is_over = True
        self._is_changed.set()

    async def wait(self) -> bool:
        """Waits until a message can be sent; returns False if the stream has ended."""
        while not (self.to_submit or self.to_abort or self._is_over):
            self._is_changed.clear()
            await self._is_changed.wait()
        return not self._is_over


@dataclass(slots=True)
class OpenRequest:
    """Unfinished request. `credential`: of its caller. `sent_over`: stream whose server has it."""

    request: ResumableRequest
    events: SessionRequest
    backoff: Backoff
    credential: str = field(default="", repr=False)
    sent_over: Outgoing | None = None
    resubmission: asyncio.Task[None] | None = None

    def cancel_resubmission(self) -> None:
        """Cancels the scheduled resubmission, if any."""
        if self.resubmission is not None:
            self.resubmission.cancel()
            self.resubmission = None


class OpenRequests:
    """Unfinished requests by handle. Only `wanted` requests can be submitted.

    An aborted request is no longer wanted: its last events arrive over the stream that has it, or
    not at all.
    """

    def __init__(self) -> None:
        self.all: dict[int, OpenRequest] = {}
        self.wanted: dict[int, OpenRequest] = {}

    def add(self, handle: int, opened: OpenRequest) -> None:
        """Adds a wanted request."""
        self.all[handle] = self.wanted[handle] = opened

    def abort(self, handle: int) -> OpenRequest | None:
        """Cancels an open request and returns it; None for a closed or cancelled handle."""
        opened = self.wanted.pop(handle, None)
        if opened is not None:
            opened.cancel_resubmission()
        return opened

    def remove(self, handle: int) -> OpenRequest:
        """Removes an ended request and returns it."""
        self.wanted.pop(handle, None)
        opened = self.all.pop(handle)
        opened.cancel_resubmission()
        return opened
