"""HTTP clients of the gateway: what answers say, and clients that leave in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from splitserve_gateway.server import Server
from tests.contract.stranger.process import poll
from tests.support.processes.fake_service import FakeService
from tests.support.processes.gateway import RunningGateway, post_bytes
from tests.support.processes.patience import PATIENCE_S

# Different in every answer; how much of a prompt was cached is another matter.
OWN = {
    "id",
    "model",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "cached_tokens",
    "sequence_number",
}


@dataclass(slots=True)
class HttpAnswer:
    """Text, tokens, logprobs and finish reason of each choice. `last`: the last event."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    last: Any = None

    @classmethod
    def of(cls, stream: str) -> HttpAnswer:
        """Reads a complete stream."""
        answer = cls()
        for line in stream.split("\n"):
            answer.add_line(line)
        return answer

    @classmethod
    def whole(cls, content: object) -> HttpAnswer:
        """Reads an answer that was not streamed."""
        return cls(last=without_own(content))

    def add_line(self, line: str) -> dict[str, Any] | None:
        """Takes a line of the stream; returns its event, if it is one."""
        if not line.startswith("data: {"):
            return None
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        self.last = without_own(event)
        if isinstance(event.get("delta"), str):
            self.texts[0] = self.texts.get(0, "") + event["delta"]
        for choice in event.get("choices", ()):
            self._add_choice(choice)
        return event

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        self.texts[index] = self.texts.get(index, "") + text
        logprobs = choice.get("logprobs") or {}
        self.tokens.setdefault(index, []).extend(logprobs.get("tokens", []))
        self.scores.setdefault(index, []).extend(logprobs.get("token_logprobs", []))
        if choice["finish_reason"] is not None:
            self.ends[index] = choice["finish_reason"]

    def begins(self, other: HttpAnswer) -> bool:
        """Whether the texts of `other` begin with these."""
        return all(other.texts.get(i, "").startswith(text) for i, text in self.texts.items())


def without_own(value: Any) -> Any:  # noqa: ANN401
    """Removes the fields that differ between two answers to the same request."""
    if isinstance(value, dict):
        return {name: without_own(part) for name, part in value.items() if name not in OWN}
    return [without_own(part) for part in value] if isinstance(value, list) else value


_BODIES: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/completions", {"prompt": "one two three", "max_tokens": 60}),
    ("/v1/completions", {"prompt": "one two three", "max_tokens": 60, "stream": True}),
    ("/v1/completions", {"prompt": ["a b", "c", "d e f"], "max_tokens": 40, "stream": True}),
    ("/v1/completions", {"prompt": "x", "n": 3, "max_tokens": 40}),
    ("/v1/completions", {"prompt": "word " * 600, "max_tokens": 400, "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "stream": True},
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10_000_000}),
    ("/v1/nothing", {}),
)
# Leaves before all is sent; before any of the answer; after some of it; after what comes first.
_PLACES = ("sending", "sent", "reading", "long")


async def leave_at_random(gateway: RunningGateway, rng: random.Random) -> None:
    """Connects a client, and leaves at a random point."""
    reader, writer = await gateway.connect()
    data = b"".join(post_bytes(*rng.choice(_BODIES)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    place = rng.choice(_PLACES)
    try:
        if place == "sending":
            data = data[: rng.randrange(len(data))]
        writer.write(data)
        await writer.drain()
        if place == "reading":
            await reader.read(rng.choice((1, 200, 2000)))
        elif place == "long":
            async with asyncio.timeout(rng.random() / 4):
                await reader.readexactly(rng.randrange(100, 5000))
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        pass  # it was cut, or the answer was shorter, or takes longer than one has patience for
    await _leave(reader, writer, rng)


async def _leave(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random
) -> None:
    way = rng.choice(("close", "reset", "half"))
    plain = writer.get_extra_info("socket")
    try:
        if way == "reset":
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way == "half" and writer.can_write_eof():
            # Says that it sends no more, and waits: the other side is to close.
            writer.write_eof()
            while await reader.read(65536):
                pass
    except OSError:
        pass
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def leave_often(
    gateway: RunningGateway, num_clients: int, width: int, rng: random.Random
) -> None:
    """`num_clients`, of which `width` are there at a time."""
    remaining = iter(range(num_clients))

    async def one_after_another() -> None:
        for _ in remaining:
            await leave_at_random(gateway, rng)

    await asyncio.gather(*(one_after_another() for _ in range(width)))


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Resources that must not remain."""

    num_tasks: int
    num_files: int

    @classmethod
    def now(cls) -> Leftovers:
        """Counts the resources of this process."""
        return cls(len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")))


async def wait_for_nothing(
    server: Server,
    service: FakeService,
    before: Leftovers,
) -> None:
    """Waits until no block, request, connection, task and file is left. Raises TimeoutError."""
    await service.wait_idle()

    async def look() -> tuple[bool, object]:
        left = Leftovers.now()
        counts = (
            server.exchanges.num_open,
            server.app.state.gateway.fleet.num_session_requests,
            len(server.server_state.connections),
        )
        is_clean = left.num_tasks <= before.num_tasks and left.num_files <= before.num_files
        return is_clean and not any(counts), (left, before, counts)

    await poll(look, PATIENCE_S)
