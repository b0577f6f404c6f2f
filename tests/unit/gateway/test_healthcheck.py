"""The health probe of the gateway's image."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from splitserve_gateway import healthcheck
from tests.support.processes.addresses import reserve_address


@contextmanager
def answering(status: int) -> Iterator[tuple[int, list[str]]]:
    """A server's port, and the paths that it is asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, paths
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (500, 1)])
def test_gateway_is_asked_where_its_options_say_without_a_proxy(
    status: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{reserve_address()}")
    with answering(status) as (port, paths):
        for argv, environ in (
            ([f"--http=0.0.0.0:{port}"], {}),
            ([], {"SPLITSERVE_HTTP": f"127.0.0.1:{port}"}),
        ):
            assert healthcheck.main(argv, environ) == code
    assert paths == ["/health/live"] * 2


def test_reason_is_told_when_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    address = reserve_address()
    assert healthcheck.main([], {"SPLITSERVE_HTTP": address}) == 1
    assert capsys.readouterr().err.startswith(f"{address}: ")
