"""The process in its own place once more, with other options."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def start_again(more_flags: Sequence[str], cluster_token: str | None) -> NoReturn:
    """Becomes what this process was started as, with `more_flags`, which go before all others.

    `cluster_token`: its file may have been a pipe, which says it only once; so there is another.
    """
    command = [sys.executable, *sys.orig_argv[1:], *more_flags]
    if cluster_token is not None:
        reading, writing = os.pipe()
        with open(writing, "w", encoding="ascii") as pipe:
            pipe.write(cluster_token)  # far less than a pipe holds
        os.set_inheritable(reading, True)
        command.append(f"--cluster-token-file=/dev/fd/{reading}")
    os.execv(sys.executable, command)
