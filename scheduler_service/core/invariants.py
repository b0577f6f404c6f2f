"""What the core says when it finds itself wrong."""

from __future__ import annotations


class InvariantBroken(Exception):
    """The core's state contradicts itself: a fault of ours, and the core is not to be used further.

    `request_id`: the request whose state it is, if the fault is known to be confined to one.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
