"""What a message of a stream costs a process by gRPC's asyncio, beside other ways to send it.

A client sends a message and reads its echo, over and over, on one stream or on several at once; the
echo comes from another process. `us`: the CPU time of the client process for one of each, threads
of gRPC included; `switches`: how often one of its threads waited. `threads`: with fewer of gRPC's,
as `splitserve serve` starts processes, or as many as it chooses. Every way runs in processes of its
own, in turns with the others; figures are medians. One JSON object for each way.

`bytes`: read() and write() of what is encoded already, as batches are sent to executors;
`messages` encodes and decodes protobuf; `iterators`: what is read and written are asynchronous
iterators; `uvloop`: `bytes` on that event loop; `synchronous`: gRPC's other API, which has threads;
`sockets`: streams of asyncio without gRPC, what the rest cannot get below.

python -m benchmarks.grpc_messages --streams 1 16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import grpc
import grpc.aio

from benchmarks.report import emit
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_common import GRPC_ENVIRONMENT

_METHOD = "/benchmarks.Echo/Echo"
# About what a step of 64 rows is.
_DATA = bytes(1200)
_WARM_UP = 20
# Each client has a connection of its own, as each executor has.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"fewer": GRPC_ENVIRONMENT, "gRPC's": {"GRPC_EXPERIMENTS": ""}}
)

Stream = Callable[[str, int], Awaitable[None]]


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self._echo)

    @staticmethod
    async def _echo(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for message in messages:
            await context.write(message)


async def _echo_socket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(len(_DATA)):
        writer.write(data)


async def serve() -> None:
    """Echoes until killed; prints the ports for gRPC and for plain sockets."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sockets = await asyncio.start_server(_echo_socket, "127.0.0.1", 0)
    sys.stdout.write(f"{port} {sockets.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await sockets.serve_forever()


# -- ways to send a message ----------------------------------------------------------------------


async def _bytes(port: str, count: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", _OPTIONS) as channel:
        call = channel.stream_stream(_METHOD)()
        for _ in range(count):
            await call.write(_DATA)
            await call.read()
        call.cancel()


async def _messages(port: str, count: int) -> None:
    message = executor.ScheduleBatch(work=executor.Work(token_ids=_DATA))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", _OPTIONS) as channel:
        call = channel.stream_stream(
            _METHOD,
            request_serializer=executor.ScheduleBatch.SerializeToString,
            response_deserializer=executor.ScheduleBatch.FromString,
        )()
        for _ in range(count):
            await call.write(message)
            await call.read()
        call.cancel()


async def _iterators(port: str, count: int) -> None:
    to_send: asyncio.Queue[bytes] = asyncio.Queue()

    async def requests() -> AsyncIterator[bytes]:
        while True:
            yield await to_send.get()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", _OPTIONS) as channel:
        call = channel.stream_stream(_METHOD)(requests())
        to_send.put_nowait(_DATA)
        num_read = 0
        async for _ in call:
            num_read += 1
            if num_read == count:
                break
            to_send.put_nowait(_DATA)
        call.cancel()


async def _sockets(port: str, count: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    for _ in range(count):
        writer.write(_DATA)
        await reader.readexactly(len(_DATA))
    writer.close()


def _synchronous(port: str, count: int) -> None:
    to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{port}", _OPTIONS) as channel:
        call = channel.stream_stream(_METHOD)(iter(to_send.get, None))
        for _ in range(count):
            to_send.put(_DATA)
            next(call)
        to_send.put(None)
        call.cancel()


_STREAMS: Mapping[str, Stream] = MappingProxyType(
    {
        "bytes": _bytes,
        "messages": _messages,
        "iterators": _iterators,
        "uvloop": _bytes,
        "sockets": _sockets,
    }
)
WAYS = (*_STREAMS, "synchronous")


# -- one way in one process ------------------------------------------------------------------------


class _Used:
    """Of this process since this was made."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._num_switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

    def report(self, num_messages: int) -> None:
        """Prints what each message took."""
        us = 1e6 * (time.process_time() - self._cpu_s) / num_messages
        num_switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - self._num_switches
        sys.stdout.write(json.dumps({"us": us, "switches": num_switches / num_messages}) + "\n")


async def _run(stream: Stream, port: str, num_streams: int, count: int) -> None:
    await asyncio.gather(*(stream(port, _WARM_UP) for _ in range(num_streams)))
    used = _Used()
    await asyncio.gather(*(stream(port, count) for _ in range(num_streams)))
    used.report(num_streams * count)


def _run_threads(port: str, num_streams: int, count: int) -> None:
    _synchronous(port, _WARM_UP)
    used = _Used()
    arguments = (port, count)
    threads = [threading.Thread(target=_synchronous, args=arguments) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used.report(num_streams * count)


def run_way(way: str, port: str, num_streams: int, count: int) -> None:
    """Sends `count` messages on each of `num_streams` streams; prints what each took."""
    if way == "synchronous":
        _run_threads(port, num_streams, count)
    elif way == "uvloop":
        import uvloop

        uvloop.run(_run(_STREAMS[way], port, num_streams, count))
    else:
        asyncio.run(_run(_STREAMS[way], port, num_streams, count))


# -- all of them -----------------------------------------------------------------------------------


@contextmanager
def _server() -> Iterator[tuple[str, str]]:
    command = [sys.executable, "-m", "benchmarks.grpc_messages", "--serve"]
    environ = {**os.environ, **GRPC_ENVIRONMENT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            port, socket_port = process.stdout.readline().split()
            yield port, socket_port
        finally:
            process.kill()


def measure(num_streams: int, count: int, num_rounds: int, ways: tuple[str, ...]) -> None:
    """Prints the figures of every way."""
    cases = [(way, threads) for way in ways for threads in _ENVIRONMENTS]
    results: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    with _server() as (port, socket_port):
        for _ in range(num_rounds):
            for way, threads in cases:
                told = (way, socket_port if way == "sockets" else port, num_streams, count)
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.grpc_messages", "--way", *map(str, told)],
                    env={**os.environ, **_ENVIRONMENTS[threads]},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                results[way, threads].append(json.loads(done.stdout))
    for (way, threads), runs in results.items():
        medians = {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}
        emit("grpc_messages", way=way, threads=threads, streams=num_streams, **medians)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--messages", type=int, default=3000, help="on all streams together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
    elif arguments.way:
        way, port, num_streams, count = arguments.way
        run_way(way, port, int(num_streams), int(count))
    else:
        for num_streams in arguments.streams:
            count = max(arguments.messages // num_streams, 1)
            measure(num_streams, count, arguments.rounds, tuple(arguments.ways))


if __name__ == "__main__":
    main()
