"""How long gRPC itself takes to notice that a peer is dark.

`stop`: the peer gets SIGSTOP, so its kernel still acknowledges packets. `drop`: the kernel loses
all packets of the connection; for this the process has a network namespace of its own (`UNSHARE`).
Either is measured at both ends of an idle stream.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from splitserve_rpc import channel_options
from tests.support.chaos.namespaces import UNSHARE
from tests.support.processes.forked import ROOT, SOURCE_ROOTS

_PATH = "/Dark/Echo"
_LO_UP = "ip link set lo up"
# Either program will do.
_DROPS = (
    "iptables -A INPUT -p tcp --dport {port} -j DROP && iptables -A INPUT -p tcp --sport {port}"
    " -j DROP",
    "nft add table inet dark && nft add chain inet dark input"
    " '{{ type filter hook input priority 0; }}' && nft add rule inet dark input tcp dport {port}"
    " drop && nft add rule inet dark input tcp sport {port} drop",
)


def can_drop() -> bool:
    """Whether this machine allows a namespace in which packets are lost."""
    drops = " || ".join(f"({drop.format(port=1)})" for drop in _DROPS)
    tried = subprocess.run(
        [*UNSHARE, "sh", "-c", f"{_LO_UP} && ({drops})"], capture_output=True, check=False
    )
    return tried.returncode == 0


def measure(how: str) -> dict[str, float]:
    """Seconds until the client, and the server, noticed; `how`: stop or drop."""
    command = [sys.executable, "-m", "tests.support.chaos.dark_connection", how]
    if how == "drop":
        command = [*UNSHARE, *command]
    paths = os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS)
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    noticed: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return noticed


async def _echo(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
    try:
        async for request in requests:
            yield request
    finally:
        _say("ended")


async def _serve() -> None:
    server = grpc.aio.server(options=channel_options())
    echo: Any = grpc.stream_stream_rpc_method_handler(_echo)
    handlers = grpc.method_handlers_generic_handler("Dark", {"Echo": echo})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _say(str(port))
    await server.wait_for_termination()


async def _call(port: str) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", channel_options()) as channel:
        call = channel.stream_stream(_PATH)()
        await call.write(b"a")
        await call.read()
        _say("open")
        try:
            await call.read()
        except grpc.aio.AioRpcError:
            _say("ended")


def _say(what: str) -> None:
    sys.stdout.write(f"{what} {time.monotonic()}\n")
    sys.stdout.flush()


class _End:
    """A process at one end of the connection."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.support.chaos.dark_connection", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def hear(self) -> tuple[str, float]:
        """What it says next, and when."""
        assert self.process.stdout is not None
        said, when_s = self.process.stdout.readline().split()
        return said, float(when_s)


def _measure_pair(how: str, stopped: str) -> dict[str, float]:
    """With `stopped`, the client or the server, as the dark one (`drop`: both are)."""
    server = _End("serve")
    port, _ = server.hear()
    client = _End("call", port)
    try:
        client.hear()
        since_s = time.monotonic()
        if how == "stop":
            (client if stopped == "client" else server).process.send_signal(signal.SIGSTOP)
        else:
            drops = " || ".join(f"({drop.format(port=port)})" for drop in _DROPS)
            subprocess.run(["sh", "-c", drops], check=True, stderr=subprocess.DEVNULL)
        ends = {"client": client, "server": server}
        if how == "stop":
            del ends[stopped]
        return {name: end.hear()[1] - since_s for name, end in ends.items()}
    finally:
        for end in (client, server):
            end.process.kill()
            end.process.communicate()


def _main(how: str, *arguments: str) -> None:
    mains: dict[str, Callable[..., Awaitable[None]]] = {"serve": _serve, "call": _call}
    if how in mains:
        asyncio.run(mains[how](*arguments))  # type: ignore[arg-type]
        return
    if how == "drop":
        subprocess.run(_LO_UP.split(), check=True)
        noticed = _measure_pair(how, "")
    else:
        noticed = _measure_pair(how, "client") | _measure_pair(how, "server")
    sys.stdout.write(json.dumps(noticed))


if __name__ == "__main__":
    _main(*sys.argv[1:])
