"""Warns of credentials that others on the way to a server can read."""

from __future__ import annotations

import functools
import logging

from splitserve_rpc.addresses import is_loopback

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def warn_of_plain_text(address: str) -> None:
    """Once for a server of another machine.

    It is no refusal: whether the way is protected otherwise, by a tunnel for one, only who
    configured the client knows. Without handlers for logs, Python writes the line to stderr.
    """
    if not is_loopback(address):
        _log.warning(
            "credential_in_plain_text address=%s: who is on the way can read it; give TLS files",
            address,
        )
