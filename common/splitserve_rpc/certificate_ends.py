"""Periodic check whether the certificates that a process shows expire soon."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

from splitserve_rpc.certificate import Certificate, load_pair, warn_of_end
from splitserve_rpc.tls import TlsFiles
from splitserve_rpc.watched_files import FilesUnusable

_PERIOD_S = 3600.0


async def _pause() -> None:
    await asyncio.sleep(_PERIOD_S)


class CertificateEnds:
    """Checks the certificates of `shown`, each once.

    None and files without a certificate are skipped.
    """

    def __init__(
        self, shown: Iterable[TlsFiles | None], now_s: Callable[[], float] = time.time
    ) -> None:
        """`now_s`: wall clock, in seconds since 1970."""
        # Key by certificate, so that each certificate is checked once.
        self._pairs = {
            files.cert: files.key for files in shown if files is not None and files.cert is not None
        }
        self._now_s = now_s
        self._last: dict[Path, Certificate] = {}

    def look(self) -> None:
        """Reads all certificates and warns of those that expire soon or have expired. Blocks."""
        now_s = self._now_s()
        for cert, key in self._pairs.items():
            assert key is not None, "they are given together"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # The user of the files reports the error and keeps using the last certificate.
            with suppress(FilesUnusable):
                self._last[cert] = load_pair(context, cert, key, now_s=now_s)
            if cert in self._last:
                warn_of_end(cert, self._last[cert], now_s)

    async def keep_looking(self, pause: Callable[[], Awaitable[None]] = _pause) -> None:
        """Checks the certificates at once and after each `pause`, until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await pause()
