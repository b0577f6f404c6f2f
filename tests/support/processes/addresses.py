"""Addresses that are ours before anybody listens there: `reserve_address`."""

from __future__ import annotations

import atexit
import socket
from collections import deque

# Of the last ones alone: no test has more.
_MOST_RESERVED = 64
_reserved: deque[socket.socket] = deque()


@atexit.register
def _give_back() -> None:
    for holder in _reserved:
        holder.close()


def reserve_address() -> str:
    """`127.0.0.1:PORT`, a port that the kernel gives to nobody else for now.

    A socket stays bound to it and does not listen: who connects is refused, and a server that sets
    SO_REUSEADDR, as those of gRPC do, may come, go and come again.
    """
    if len(_reserved) == _MOST_RESERVED:
        _reserved.popleft().close()
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _reserved.append(holder)
    return f"127.0.0.1:{holder.getsockname()[1]}"
