"""A server that speaks OpenAI's API to other processes, and may be told to answer nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.bench.openai_server import end, text
from tests.support.processes.patience import PATIENCE_S


@dataclass
class AnsweringServer:
    """`bodies`: what was asked, each body once. `hold(n)`: the n-th and later get no answer."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _first_held: float = float("inf")
    _is_over: bool = False

    def hold(self, number: int) -> None:
        """From that one on."""
        self._first_held = number

    def wait_for(self, number: int) -> None:
        """Until so many have been asked."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.bodies) >= number, PATIENCE_S)

    def take(self, body: dict[str, Any]) -> bool:
        """Whether it is answered."""
        with self._changed:
            self.bodies.append(body)
            self._changed.notify_all()
            if len(self.bodies) >= self._first_held:
                self._changed.wait_for(lambda: self._is_over, PATIENCE_S)
            return not self._is_over

    def close(self) -> None:
        """Whoever is held gets nothing."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@contextmanager
def answering_server() -> Iterator[AnsweringServer]:
    """One that runs; every answer has as many tokens as were wanted."""
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
            """Says nothing."""

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
