"""Listener that bounds connections by origin, before reading a byte and before TLS."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from splitserve_gateway.http.connection import Connection
from splitserve_gateway.sharing import HELD_PER_LEFT, Shares
from splitserve_rpc import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S

# Pause after a failed accept: a missing resource, such as open files, may be free again.
_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


def connection_places(most_of_an_address: int) -> Shares:
    """Returns shares of connections: `most_of_an_address` per address, a sixteenth more in all."""
    return Shares(most_of_an_address + -(-most_of_an_address // HELD_PER_LEFT))


class Listener:
    """Accepts connections on `listening`; closes a connection whose origin has no place left.

    A TLS handshake takes a place like any connection, since it costs as much; asyncio's own server
    would shake hands without a bound. Has the methods of `asyncio.Server` that uvicorn calls.
    """

    def __init__(
        self,
        listening: socket.socket,
        places: Callable[[], Shares],
        new_connection: Callable[[], Connection],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Starts accepting. `tls`: None for plain text."""
        self._listening = listening
        self._listening.setblocking(False)
        self._places = places
        self._new_connection = new_connection
        self._options: dict[str, Any] = {}
        if tls is not None:
            self._options = {
                "ssl": tls,
                "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
                "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
            }
        self._tasks = {asyncio.create_task(self._accept())}

    def close(self) -> None:
        """Stops accepting; open connections go on."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until no connection is being accepted."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        with self._listening:
            while True:
                try:
                    client, address = await loop.sock_accept(self._listening)
                except ConnectionError:
                    # The client has left already.
                    continue
                except OSError as error:
                    _log.error("connections_not_taken problem=%r", error.strerror)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                self._take(client, origin_of(address))
                # While many connections wait, `sock_accept` never suspends: let other tasks run.
                await asyncio.sleep(0)

    def _take(self, client: socket.socket, origin: str) -> None:
        places = self._places()
        if not places.may_take(origin, 1):
            client.close()
            return
        places.take(origin, 1)
        task = asyncio.create_task(self._meet(client, partial(places.give_back, origin, 1)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _meet(self, client: socket.socket, leave: Callable[[], None]) -> None:
        connection = self._new_connection()
        connection.leave = leave
        try:
            if client.family in (socket.AF_INET, socket.AF_INET6):
                # Set here, whether or not asyncio does so.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Errors, including TLS errors, end the connection: no request exists to report them to.
            with suppress(OSError):
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: connection, client, **self._options)
        finally:
            if not connection.is_made:
                client.close()
                leave()


# -- Origin of a request, to tell floods apart -----------------------------------------------------

# A client with one IPv6 address commonly has the whole network of this prefix.
_IPV6_PREFIX_BITS = 64


def origin_of(client: Sequence[object] | None) -> str:
    """Returns the IPv4 address or the IPv6 network of an ASGI `client`; empty without a client."""
    host = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(address.packed[: _IPV6_PREFIX_BITS // 8].hex())
    return str(address)
