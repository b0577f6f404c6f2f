"""OpenAI server that answers at set instants: `python -m tests.support.bench.paced_server`.

Writes its URL to the standard output, and runs until the standard input ends. Each answer has its
own time to the first token, time per token and division into events, drawn from a seed by the
number of the request since the last `GET /record`: two generators that put the same load on it meet
the same timings. `GET /record` returns what was answered and when, by the clock of this server.

The headers and an event without text come at once, as those of a chat do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MODEL = "paced"
_SEED = 1
# Seconds, drawn evenly: wide, so that an interval is wider than the delays of a busy machine.
_TTFT_S = (0.1, 0.5)
_PER_TOKEN_S = (0.01, 0.04)
_TOKENS_OF_EVENT = (1, 3)
# Shorter answers are those to probes: they come at once and are not recorded.
_FEWEST_TOKENS = 4
_NUM_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Instants of an answer, in seconds from its start, each with its number of tokens."""

    arrivals: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, number: int, num_tokens: int) -> Plan:
        """Returns the plan of the request with this number. The first event has one token."""
        draw = random.Random(f"{_SEED} {number}")
        at_s, per_token_s = draw.uniform(*_TTFT_S), draw.uniform(*_PER_TOKEN_S)
        arrivals, num_left = [(at_s, 1)], num_tokens - 1
        while num_left:
            count = min(draw.randint(*_TOKENS_OF_EVENT), num_left)
            at_s, num_left = at_s + count * per_token_s, num_left - count
            arrivals.append((at_s, count))
        return cls(tuple(arrivals))


@dataclass(slots=True)
class Answered:
    """Instants of one request, in seconds of the server's clock. `num_tokens`: of each event."""

    arrived_s: float
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    ended_s: float = 0.0


class PacedServer:
    """Answers `num_served` requests at a time; others wait in the order in which they came."""

    def __init__(self, num_served: int) -> None:
        self._places = asyncio.Semaphore(num_served)
        self._record: list[Answered] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection, one after another."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *headers = head.decode().split("\r\n")
                lengths = [each for each in headers if each.lower().startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].split(":")[1]) if lengths else 0)
                await self._answer(line.split()[1], json.loads(body or "{}"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, path: str, body: Mapping[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if path == "/record":
            record, self._record = self._record, []
            await _send(writer, [asdict(each) for each in record])
        elif "model" not in body:
            await _send(writer, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            await self._stream(path.endswith("/chat/completions"), body, writer)

    async def _stream(
        self, is_chat: bool, body: Mapping[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        clock = asyncio.get_running_loop().time
        answered = Answered(clock())
        num_tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or 0)
        plan = Plan(((0.0, num_tokens),))
        if num_tokens >= _FEWEST_TOKENS:
            plan = Plan.of(len(self._record), num_tokens)
            self._record.append(answered)
        is_counted = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        await _write(writer, _event(is_chat, "", 0, is_counted))
        async with self._places:
            start_s, so_far = clock(), 0
            for at_s, count in plan.arrivals:
                await asyncio.sleep(start_s + at_s - clock())
                so_far += count
                answered.arrivals_s.append(clock())
                answered.num_tokens.append(count)
                await _write(writer, _event(is_chat, " word" * count, so_far, is_counted))
        choice = {"index": 0, "delta": {}, "text": "", "finish_reason": "length"}
        last = _data({"choices": [choice]})
        usage = _data({"choices": [], "usage": _usage(num_tokens)})
        await _write(writer, last + usage + b"data: [DONE]\n\n")
        answered.ended_s = clock()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _send(writer: asyncio.StreamWriter, content: object) -> None:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    writer.write(head.encode() + b"\r\n" + data)
    await writer.drain()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


def _data(content: Mapping[str, Any]) -> bytes:
    return (
        b"data: "
        + json.dumps({"id": "1", "created": 1, "model": MODEL, **content}).encode()
        + b"\n\n"
    )


def _event(is_chat: bool, text: str, num_tokens: int, is_counted: bool) -> bytes:
    said = {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    content: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": None, **said}]}
    if is_counted:
        content["usage"] = _usage(num_tokens)
    return _data(content)


def _usage(num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": _NUM_PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": _NUM_PROMPT_TOKENS + num_tokens,
    }


async def main(num_served: int, port: int) -> None:
    """Serves until the standard input ends."""
    server = await asyncio.start_server(PacedServer(num_served).connected, "127.0.0.1", port)
    host, port = server.sockets[0].getsockname()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-served", type=int, default=1000)
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.num_served, arguments.port))
