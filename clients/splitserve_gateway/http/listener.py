"""Who connects is counted by where they come from, before a byte is read and before TLS."""

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
from splitserve_gateway.sharing.turns import HELD_PER_LEFT, Shares
from splitserve_rpc.https import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S

# What is out then, say open files, may be there again.
_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


def connection_places(most_of_an_address: int) -> Shares:
    """Places for connections: so many for one address, and a sixteenth more for all others."""
    return Shares(most_of_an_address + -(-most_of_an_address // HELD_PER_LEFT))


class Listener:
    """Hands who connects to `listening` over to a connection; who has no place is cut.

    A handshake of TLS has a place like any other connection, since it costs as much. A server of
    asyncio's own shakes hands with whoever comes. Its methods are those of `asyncio.Server` that
    uvicorn calls.
    """

    def __init__(
        self,
        listening: socket.socket,
        places: Callable[[], Shares],
        new_connection: Callable[[], Connection],
        tls: ssl.SSLContext | None,
    ) -> None:
        """`tls`: None for plain text."""
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
        """Takes nobody any more; what is open goes on."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Until nobody is being met."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        with self._listening:
            while True:
                try:
                    client, address = await loop.sock_accept(self._listening)
                except ConnectionError:
                    # It has left already.
                    continue
                except OSError as error:
                    _log.error("connections_not_taken problem=%r", error.strerror)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                self._take(client, origin_of(address))
                # Where many wait, nothing of it would be a pause for others.
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
                # Whatever asyncio knows of it.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Whatever is wrong, of TLS too: nobody is there to be told.
            with suppress(OSError):
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: connection, client, **self._options)
        finally:
            if not connection.is_made:
                client.close()
                leave()


# -- From where a request comes, as far as floods are told apart by it -----------------------------

# Whoever has one address of IPv6 has as many as this leaves open.
_IPV6_PREFIX_BITS = 64


def origin_of(client: Sequence[object] | None) -> str:
    """The address of an ASGI `client`, or its network; empty if there is none."""
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
