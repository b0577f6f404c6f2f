"""Imports of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_without_collections() -> Iterator[None]:
    """Keeps garbage collections away from imports, whose objects live as long as the process.

    They would cost a second while torch is imported.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
