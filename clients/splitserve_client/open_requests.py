"""The unfinished requests of a session, and what is still to be sent of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from splitserve_client.resumable_request import ResumableRequest
from splitserve_client.resumption import Backoff
from splitserve_client.session_request import SessionRequest


class Outgoing:
    """What one stream has still to send; each handle once, so that aborting what waits frees it.

    `left`: is set once nothing more is submitted over it, though what it has goes on there.
    `takes_submissions`: the server reads several requests in one message.
    """

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.takes_submissions = False
        self.to_submit: dict[int, None] = {}
        self.to_abort: dict[int, None] = {}
        self._is_changed = asyncio.Event()
        self._is_over = False

    def submit(self, handle: int) -> None:
        """Has a request sent."""
        self.to_submit[handle] = None
        self._is_changed.set()

    def abort(self, handle: int) -> None:
        """Has an abort sent."""
        self.to_abort[handle] = None
        self._is_changed.set()

    def leave(self) -> None:
        """Nothing more is submitted."""
        self.to_submit.clear()
        self.left.set()

    def end(self) -> None:
        """The stream is no more."""
        self.to_submit.clear()
        self.to_abort.clear()
        self._is_over = True
        self._is_changed.set()

    async def wait(self) -> bool:
        """Waits until there is something; False: nothing more can be sent."""
        while not (self.to_submit or self.to_abort or self._is_over):
            self._is_changed.clear()
            await self._is_changed.wait()
        return not self._is_over


@dataclass(slots=True)
class OpenRequest:
    """An unfinished request. `credential`: whose it is. `sent_over`: whose server has it."""

    request: ResumableRequest
    events: SessionRequest
    backoff: Backoff
    credential: str = field(default="", repr=False)
    sent_over: Outgoing | None = None
    resubmission: asyncio.Task[None] | None = None

    def cancel_resubmission(self) -> None:
        """It is not submitted again by itself."""
        if self.resubmission is not None:
            self.resubmission.cancel()
            self.resubmission = None


class OpenRequests:
    """By handle. Only those that are `wanted` can be submitted.

    One that is aborted is wanted no more: what is still to come of it comes over the stream that
    has it, or not at all.
    """

    def __init__(self) -> None:
        self.all: dict[int, OpenRequest] = {}
        self.wanted: dict[int, OpenRequest] = {}

    def add(self, handle: int, opened: OpenRequest) -> None:
        """A request that is wanted."""
        self.all[handle] = self.wanted[handle] = opened

    def abort(self, handle: int) -> OpenRequest | None:
        """What is wanted no longer; None if it was not."""
        opened = self.wanted.pop(handle, None)
        if opened is not None:
            opened.cancel_resubmission()
        return opened

    def remove(self, handle: int) -> OpenRequest:
        """Forgets a request that has ended."""
        self.wanted.pop(handle, None)
        opened = self.all.pop(handle)
        opened.cancel_resubmission()
        return opened
