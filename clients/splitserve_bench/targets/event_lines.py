"""Server-sent events out of the bytes of a response, as they come."""

from __future__ import annotations

from splitserve_bench.targets.target import AskFailed

_MOST_BYTES = 16 * 2**20


class EventLines:
    """Takes bytes, gives the data of the events that are complete with them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises AskFailed for a line without an end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            raise AskFailed("bad_answer", f"an event has more than {_MOST_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
