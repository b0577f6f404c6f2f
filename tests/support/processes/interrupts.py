"""Child processes that can be interrupted: `children_take_sigint`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def children_take_sigint() -> Iterator[None]:
    """Children started meanwhile have the default disposition of SIGINT.

    Children inherit that a signal is ignored, and a script's shell ignores SIGINT for all that it
    runs in the background: a whole test run may have been started like that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
