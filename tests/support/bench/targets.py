"""Targets for the load generator: scripted in virtual time, or OpenAI servers of known answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import httpx2

from splitserve_bench.targets import AnswerSummary, AskFailed, Part, Tokens
from splitserve_bench.workloads import Conversation, PromptPiece, Turn
from tests.simulation.virtual_loop import new_loop
from tests.support.processes.patience import PATIENCE_S

# Seconds before each arrival, and how many tokens it brings (None: that is not said).
Delays = Sequence[tuple[float, int | None]]


@dataclass(frozen=True, slots=True)
class Script:
    """Answer to one request. `failure`: raised after the arrivals, in place of an end."""

    arrivals: Delays
    end_s: float = 0.0
    failure: AskFailed | None = None
    answered: AnswerSummary | None = None


@dataclass(slots=True)
class ScriptedTarget:
    """Answers request n by `script(n)`, `num_served` at a time: others wait in its queue."""

    script: Callable[[int], Script]
    num_served: int = 10**6
    sent_s: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    salts: list[int] = field(default_factory=list)
    places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.places = asyncio.Semaphore(self.num_served)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    async def get_ready(self) -> str:
        return "scripted"

    def begin(self, salt: int) -> Self:
        self.salts.append(salt)
        return self

    def prepare(self, turn: Turn) -> _Exchange:
        self.turns.append(turn)
        return _Exchange(self, turn)


@dataclass(frozen=True, slots=True)
class _Exchange:
    target: ScriptedTarget
    turn: Turn

    async def send(self) -> AsyncGenerator[Part, None]:
        sent_s = self.target.sent_s
        script = self.target.script(len(sent_s))
        sent_s.append(asyncio.get_running_loop().time())
        async with self.target.places:
            for delay_s, num_tokens in script.arrivals:
                await asyncio.sleep(delay_s)
                yield Tokens(num_tokens)
            await asyncio.sleep(script.end_s)
        if script.failure is not None:
            raise script.failure
        num_tokens = sum(number or 1 for _, number in script.arrivals)
        yield script.answered or AnswerSummary(self.turn.num_new_tokens, num_tokens, 0)


def at(*times_s: float) -> list[Conversation]:
    """Single requests of 10 tokens that are due then."""
    return [
        Conversation(time_s, (Turn((PromptPiece(number, 10),), 4),))
        for number, time_s in enumerate(times_s)
    ]


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
    """Runs `main` in virtual time and returns its result; no other task may have failed."""
    loop = new_loop()
    try:
        result = loop.run_until_complete(main)
    finally:
        loop.close()
    assert loop.errors == []
    return result


Piece = tuple[float, bytes]


@dataclass(slots=True)
class Answer:
    """`pieces`: bytes, each after so many seconds. `error`: in place of what would come next."""

    pieces: Sequence[Piece] = ()
    status: int = 200
    error: Exception | None = None


@dataclass
class OpenAiServer(httpx2.AsyncBaseTransport):
    """`answer(n)`: to the request with number n. `bodies`: what was asked."""

    answer: Callable[[int], Answer]
    models: object = field(default_factory=lambda: {"data": [{"id": "some-model"}]})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[httpx2.Headers] = field(default_factory=list)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            status = 200 if self.models is not None else 404
            return httpx2.Response(status, json=self.models, request=request)
        self.headers.append(request.headers)
        self.bodies.append(json.loads(await request.aread()) | {"path": request.url.path})
        answer = self.answer(len(self.bodies) - 1)
        if answer.error is not None and not answer.pieces:
            raise answer.error
        return httpx2.Response(answer.status, stream=_Stream(answer))

    def client(self) -> httpx2.AsyncClient:
        """Returns a client of this server."""
        return httpx2.AsyncClient(transport=self, base_url="http://server/v1/")


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay_s, data in self._answer.pieces:
            await asyncio.sleep(delay_s)
            yield data
        if self._answer.error is not None:
            raise self._answer.error


def event(content: object) -> bytes:
    """Event of a stream."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(said: str, finish: str | None = None, **more: object) -> bytes:
    """An event of a completion."""
    return event({"choices": [{"index": 0, "text": said, "finish_reason": finish}], **more})


def delta(finish: str | None = None, **said: object) -> bytes:
    """An event of a chat."""
    return event({"choices": [{"index": 0, "delta": said, "finish_reason": finish}]})


def usage(num_prompt: int, num_output: int, num_cached: int | None = None) -> dict[str, object]:
    """`usage` of a body or an event."""
    details = None if num_cached is None else {"cached_tokens": num_cached}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "prompt_tokens_details": details,
    }


def end(num_prompt: int, num_output: int, num_cached: int | None = None) -> bytes:
    """End of a stream: the usage, and the last line."""
    counts = usage(num_prompt, num_output, num_cached)
    return event({"choices": [], "usage": counts}) + b"data: [DONE]\n\n"


@dataclass
class AnsweringServer:
    """`bodies`: what was asked, each body once. `hold(n)`: the n-th and later get no answer."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _first_held: float = float("inf")
    _is_over: bool = False

    def hold(self, number: int) -> None:
        """Holds the answer to this request and to all later ones."""
        self._first_held = number

    def wait_for(self, number: int) -> None:
        """Waits until `number` requests have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.bodies) >= number, PATIENCE_S)

    def take(self, body: dict[str, Any]) -> bool:
        """Takes a request; returns whether it is answered."""
        with self._changed:
            self.bodies.append(body)
            self._changed.notify_all()
            if len(self.bodies) >= self._first_held:
                self._changed.wait_for(lambda: self._is_over, PATIENCE_S)
            return not self._is_over

    def close(self) -> None:
        """Ends all held requests without an answer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@contextmanager
def answering_server() -> Iterator[AnsweringServer]:
    """Runs a server whose answers have as many tokens as requested."""
    state = AnsweringServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("application/json", json.dumps({"data": [{"id": "fake"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not state.take(body):
                self.close_connection = True
                return
            wanted = body["max_tokens"]
            events = [text("a")] * (wanted - 1) + [text("a", "length")]
            answer = b"".join([*events, end(len(body["prompt"]), wanted, 0)])
            self._answer("text/event-stream", answer)

        def _answer(self, kind: str, content: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            """Logs nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_arguments: object) -> None:
            """Clients are killed here."""

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield state
        finally:
            state.close()
            server.shutdown()
            thread.join()
