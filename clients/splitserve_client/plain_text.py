"""Warning about credentials that are sent unencrypted to another machine."""

from __future__ import annotations

import functools
import logging

from splitserve_rpc.addresses import is_loopback

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def warn_of_plain_text(address: str) -> None:
    """Logs a warning, once per server of another machine.

    Sending is not refused: only the operator of the client knows whether the connection is
    protected by other means, such as a tunnel. Without log handlers Python writes the line to
    stderr.
    """
    if not is_loopback(address):
        _log.warning(
            "credential_in_plain_text address=%s: who is on the way can read it; give TLS files",
            address,
        )
