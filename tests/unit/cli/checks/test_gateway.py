"""Checks of a gateway against its scheduler."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from splitserve_cli.checks.finding import Finding, State
from splitserve_cli.checks.gateway import GatewayAddress, check_gateway
from splitserve_client import Model, Readiness

MODEL = Model("toy", "d" * 64, "float32", 97, 200, (3,), readiness=Readiness.READY)


@contextmanager
def gateway_that_says(models: bytes) -> Iterator[GatewayAddress]:
    """It is ready, and says that of its models."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = models if self.path == "/v1/models" else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            yield GatewayAddress.parse(url, None, {})
        finally:
            server.shutdown()
            serving.join()


def models_of(*models: dict[str, str]) -> Finding:
    with gateway_that_says(json.dumps({"data": models}).encode()) as address:
        findings = check_gateway(address, MODEL)
    return next(each for each in findings if each.name.startswith("models of"))


@pytest.mark.parametrize(
    ("served", "state"),
    [
        ({"id": "toy", "digest": "d" * 64}, State.OK),
        ({"id": "toy"}, State.OK),
        ({"id": "toy", "digest": "e" * 64}, State.WRONG),
        ({"id": "other", "digest": "d" * 64}, State.WARNING),
    ],
)
def test_model_of_a_gateway_is_that_of_its_scheduler(served: dict[str, str], state: State) -> None:
    assert models_of(served).state is state


def test_both_digests_are_named_when_they_differ() -> None:
    found = models_of({"id": "toy", "digest": "e" * 64})
    assert "e" * 12 in found.found
    assert "d" * 12 in found.meaning


@pytest.mark.parametrize(
    "models",
    [
        b"[]",
        b"null",
        b'{"data": 5}',
        b'{"data": [1]}',
        b'{"data": {"id": 1}}',
        b"\xff",
        b"[" * 9**5,
    ],
    ids=lambda models: models[:12].decode(errors="replace"),
)
def test_gateway_that_says_nonsense_is_wrong(models: bytes) -> None:
    with gateway_that_says(models) as address:
        (finding,) = check_gateway(address, MODEL)
    assert finding.state is State.WRONG
    assert "check that it is a splitserve gateway" in finding.remedy
