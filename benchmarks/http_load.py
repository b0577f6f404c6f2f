"""Many streams of an OpenAI server, read as cheaply as Python can: one protocol per connection.

Bytes are only looked at when all have come, so that the reader is not what is measured.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

_POLL_S = 0.005


@dataclass(slots=True)
class Stream:
    """What one request brought. Times are those of `time.perf_counter`, in seconds."""

    status: int
    sent_s: float
    times_s: list[float]
    body: bytes

    @property
    def ttft_s(self) -> float:
        """From sending to the first event."""
        return self.times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between events that did not arrive together."""
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    def events(self) -> list[dict[str, Any]]:
        """Its events, but for the last line."""
        lines = [line for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line[6:]) for line in lines]

    def text(self) -> str:
        """Of a completion with one choice."""
        return "".join(choice["text"] for event in self.events() for choice in event["choices"])


@dataclass
class _Reader(asyncio.Protocol):
    """One request at a time on one connection."""

    transport: asyncio.Transport | None = None
    done: asyncio.Future[None] | None = None
    parts: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        if b"data: {" in data:
            self.times_s.append(time.perf_counter())
        if data.endswith(b"0\r\n\r\n") or not self.parts[0].startswith(b"HTTP/1.1 200"):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        """Closes the connection; a request on it ends with what has come."""
        assert self.transport is not None
        self.transport.close()

    async def request(self, data: bytes) -> Stream:
        """Sends a request and reads its answer."""
        assert self.transport is not None
        self.parts, self.times_s = [], []
        self.done = asyncio.get_running_loop().create_future()
        sent_s = time.perf_counter()
        self.transport.write(data)
        await self.done
        answer = b"".join(self.parts)
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head else 0
        return Stream(status, sent_s, self.times_s or [time.perf_counter()], _unchunked(body))


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        num_bytes = int(size, 16)
        if not num_bytes:
            break
        parts.append(body[:num_bytes])
        body = body[num_bytes + 2 :]
    return b"".join(parts)


def encode(path: str, body: dict[str, object], host: str) -> bytes:
    """A request as bytes."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def run_closed(
    address: str,
    requests: Sequence[bytes],
    concurrency: int,
    tls: ssl.SSLContext | None = None,
    connected: Callable[[], None] = lambda: None,
) -> list[Stream]:
    """All `requests`, of which `concurrency` run at a time; in their order.

    `connected` is called when all connections are there, before the first request.
    """
    waiting = iter(enumerate(requests))
    streams: dict[int, Stream] = {}

    async def one_after_another(reader: _Reader) -> None:
        for index, data in waiting:
            streams[index] = await reader.request(data)
        reader.close()

    num_connections = min(concurrency, len(requests))
    readers = [await _connect(address, tls) for _ in range(num_connections)]
    connected()
    await asyncio.gather(*map(one_after_another, readers))
    return [streams[index] for index in range(len(requests))]


async def run_open(address: str, requests: Sequence[bytes], at_s: Sequence[float]) -> list[Stream]:
    """Sends each request at its time, seconds from now, however long others take; in their order.

    Connections are used again.
    """
    idle: list[_Reader] = []
    start = time.perf_counter()

    async def at(instant_s: float, data: bytes) -> Stream:
        await asyncio.sleep(start + instant_s - time.perf_counter())
        # Servers close connections that have been idle for some seconds.
        idle[:] = [reader for reader in idle if reader.is_open]
        reader = idle.pop() if idle else await _connect(address)
        stream = await reader.request(data)
        idle.append(reader)
        return stream

    streams = await asyncio.gather(*map(at, at_s, requests))
    for reader in idle:
        reader.close()
    return list(streams)


async def run_beside(
    address: str, running: Sequence[bytes], arriving: bytes, num_arrivals: int
) -> tuple[list[Stream], Stream]:
    """Sends `arriving` once each of `running` has had `num_arrivals`; returns `running` and it.

    The streams of `running` are broken off when the other has ended. Raises RuntimeError if one of
    them ends before.
    """
    readers = [await _connect(address) for _ in running]
    tasks = [
        asyncio.create_task(reader.request(data))
        for reader, data in zip(readers, running, strict=True)
    ]
    try:
        while any(len(reader.times_s) < num_arrivals for reader in readers):
            _check_running(tasks)
            await asyncio.sleep(_POLL_S)
        readers.append(await _connect(address))
        stream = await readers[-1].request(arriving)
        _check_running(tasks)
    finally:
        for reader in readers:
            reader.close()
    return await asyncio.gather(*tasks), stream


def _check_running(tasks: Sequence[asyncio.Task[Stream]]) -> None:
    for task in tasks:
        if task.done():
            end = task.result().body[-300:]
            raise RuntimeError(f"a stream beside which another was to run has ended: {end!r}")


async def _connect(address: str, tls: ssl.SSLContext | None = None) -> _Reader:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(_Reader, host, int(port), ssl=tls)
    return reader
