"""Whether anybody listens at an address, as the machine there says by itself."""

from __future__ import annotations

import asyncio
import socket

_TIMEOUT_S = 1.0


async def is_refused(target: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Whether every address that `target` (`host:port`) stands for refuses connections.

    Nobody listens there then, and whoever did is gone. False where that is not certain: there is
    somebody, or no answer in time, no way there, no such name.
    """
    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)
                    try:
                        await loop.sock_connect(probe, address)
                    except ConnectionRefusedError:
                        continue
                return False
    except (OSError, ValueError, OverflowError):  # TimeoutError, too
        return False
    return bool(found)
