"""Servers: how they listen to calls, wait for them, and end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError

from splitserve_common import GRPC_ENVIRONMENT, with_fewer_threads
from splitserve_contract import DomainError
from splitserve_rpc import Access, BoundaryInterceptor, OpenHandlers
from tests.support.processes.patience import PATIENCE_S


class Refused(Exception):
    """As the library ends a call."""


class Context:
    """As much of a call as its boundary needs."""

    async def abort_with_status(self, status: Any) -> None:  # noqa: ANN401
        self.status = status
        raise Refused


Heard = list[tuple[str, str]]
CHECK = "/grpc.health.v1.Health/Check"


def boundary(limit: int, heard: Heard) -> BoundaryInterceptor:
    """It appends to `heard` what it refuses."""

    def hear(method: str, _context: object, reason: str) -> None:
        heard.append((method, reason))

    return BoundaryInterceptor(lambda: limit, Access(), hear)


async def handler_of_lengths(limit: int, decoded: list[bytes], heard: Heard | None = None) -> Any:  # noqa: ANN401
    """A method that says how many bytes its message has, behind a boundary."""

    def decode(message: bytes) -> bytes:
        decoded.append(message)
        if message == b"?":
            raise DecodeError
        return message

    async def method(message: bytes, _context: object) -> int:
        if not message:
            raise DomainError("PROMPT_EMPTY", "nothing is in it")
        return len(message)

    async def continuation(_details: object) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(method, decode, str)

    details = SimpleNamespace(method=CHECK, invocation_metadata=())
    watched = boundary(limit, [] if heard is None else heard)
    handler = await watched.intercept_service(continuation, details)
    return handler.unary_unary


async def test_message_is_not_decoded_when_it_is_too_large() -> None:
    decoded: list[bytes] = []
    context = Context()
    call = await handler_of_lengths(10, decoded)
    with pytest.raises(Refused):
        await call(bytes(11), context)
    (value,) = (value for key, value in context.status.trailing_metadata if key.endswith("-bin"))
    assert b"MESSAGE_TOO_LARGE" in value
    assert "11 bytes" in context.status.details
    assert decoded == []


async def test_message_is_decoded_when_at_the_size_limit() -> None:
    decoded: list[bytes] = []
    call = await handler_of_lengths(10, decoded)
    assert await call(bytes(10), Context()) == 10
    assert decoded == [bytes(10)]


async def test_whoever_counts_refusals_hears_of_each_wherever_it_comes_from() -> None:
    heard: Heard = []
    call = await handler_of_lengths(10, [], heard)
    for message in (bytes(11), b"?", b""):
        with pytest.raises(Refused):
            await call(message, Context())
    assert await call(b"12", Context()) == 2
    expected = ["MESSAGE_TOO_LARGE", "MESSAGE_UNDECODABLE", "PROMPT_EMPTY"]
    assert heard == [(CHECK, reason) for reason in expected]


async def test_method_that_nobody_wrote_is_heard_of() -> None:
    heard: Heard = []

    async def continuation(_details: object) -> None:
        return None

    details = SimpleNamespace(method="/some/Method", invocation_metadata=())
    handler = await boundary(10, heard).intercept_service(continuation, details)
    with pytest.raises(Refused):
        await handler.stream_stream(None, Context())
    assert heard == [("/some/Method", "METHOD_UNKNOWN")]


async def test_only_handlers_are_waited_for_when_a_server_stops() -> None:
    handlers, begun, ended = OpenHandlers(), asyncio.Event(), []

    async def wait(request: bytes, context: grpc.aio.ServicerContext) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            # What a handler has to do yet.
            for _ in range(10):
                await asyncio.sleep(0)
            ended.append(request)

    server = grpc.aio.server(interceptors=[handlers])
    method = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("a.Service", {"Wait": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # As that of the process which stops its servers.
    other = asyncio.create_task(asyncio.Event().wait())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/a.Service/Wait")(b"a request")
        await begun.wait()
        assert not await handlers.wait_ended(0)
        await server.stop(None)

        assert await handlers.wait_ended(PATIENCE_S)

        assert ended == [b"a request"]
        assert not other.done()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    other.cancel()


async def test_nothing_is_waited_for_when_no_call_is_open() -> None:
    assert await OpenHandlers().wait_ended(0)


TIMEOUT_S = 240.0
_PROGRAM = """
import asyncio, threading, time
from splitserve_rpc import server

async def main():
    server._ORPHAN_GRACE_S = 0.0
    stop = server.stop_event(exit_on_stdin_eof=True, drain_s={drain_s})
    print("started", flush=True)
    {work}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("work", "drain_s", "code"),
    [
        ("await stop.wait()", 600, 0),
        ("time.sleep(600)", 0.01, 1),
        ("await asyncio.gather(stop.wait(), asyncio.to_thread(time.sleep, 600))", 0.01, 1),
        ("threading.Thread(target=time.sleep, args=(600,)).start()", 0.01, 1),
    ],
    ids=["well", "blocked loop", "thread of the loop", "thread"],
)
def test_process_ends_when_its_parent_is_gone(work: str, drain_s: float, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(work=work, drain_s=drain_s)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == code


ROOT = Path(__file__).parents[3]
# What is said of an environment is said when a channel or a server is made.
_SERVER = """
import asyncio, grpc.aio

async def serve():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)

asyncio.run(serve())
"""


def _complaints(environ: dict[str, str]) -> str:
    command = [sys.executable, "-c", _SERVER]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stderr


def test_grpc_knows_the_names_in_the_environment() -> None:
    assert "Unknown experiment" in _complaints({**os.environ, "GRPC_EXPERIMENTS": "-not_one"})
    assert "Unknown experiment" not in _complaints({**os.environ, **GRPC_ENVIRONMENT})


def test_with_fewer_threads_leaves_what_was_told() -> None:
    told = {"GRPC_EXPERIMENTS": "", "PATH": "/bin"}

    assert with_fewer_threads(told) == told
    assert with_fewer_threads({"PATH": "/bin"}) == {**GRPC_ENVIRONMENT, "PATH": "/bin"}


def test_images_have_the_same_environment() -> None:
    base = (ROOT / "Dockerfile").read_text().partition(" AS runtime\n")[2].partition("\nFROM ")[0]

    assert all(f"{name}={value}" in base for name, value in GRPC_ENVIRONMENT.items())
