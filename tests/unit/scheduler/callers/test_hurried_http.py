"""An answer that comes byte by byte, and never to its end, is given up.

The clock moves with each look at it, so nothing here depends on how fast anything is.
"""

from __future__ import annotations

import itertools
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from scheduler_service.callers.issuer_keys import CannotFetch, fetch, hurried_opener
from tests.support.processes.patience import PATIENCE_S

WITHIN_S = 1000.0


@contextmanager
def trickling(begin: bytes, again: bytes) -> Iterator[str]:
    """The URL of who answers `begin`, and then `again` for ever."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError), listening.accept()[0] as connection:
            connection.recv(2**16)
            connection.sendall(begin)
            while True:
                connection.sendall(again)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/keys"
    finally:
        listening.close()
        thread.join()


def clock() -> Callable[[], float]:
    """Comes to an end of WITHIN_S with the fourth look after the first."""
    ticks = itertools.count(step=300)
    return lambda: float(next(ticks))


def read_all(opener: urllib.request.OpenerDirector, url: str) -> None:
    with opener.open(url, timeout=PATIENCE_S) as answer:
        while answer.read1(100):
            pass


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 500),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 500),
    ],
    ids=["headers", "interim answers", "body"],
)
def test_answer_is_given_up_when_it_does_not_come_to_its_end(begin: bytes, again: bytes) -> None:
    opener = hurried_opener(WITHIN_S, clock())
    with trickling(begin, again) as url, pytest.raises(TimeoutError):
        read_all(opener, url)


def test_url_is_named_when_its_answer_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "scheduler_service.callers.issuer_keys.hurried_opener",
        lambda within_s: hurried_opener(WITHIN_S, clock()),
    )
    with (
        trickling(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 500) as url,
        pytest.raises(CannotFetch, match=rf"^{url}: takes too long; allowed: 5 s$"),
    ):
        fetch(url)
