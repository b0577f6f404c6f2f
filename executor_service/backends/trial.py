"""A kernel serves only once it has done on this machine what plain torch does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from executor_service.errors import one_line

_log = logging.getLogger(__name__)
_Kernel = TypeVar("_Kernel")


class KernelWrong(Exception):
    """A kernel does something else than plain torch."""


def tried(
    name: str,
    make: Callable[[], _Kernel],
    check: Callable[[_Kernel], None],
    in_torch: _Kernel,
) -> _Kernel:
    """What `make` makes; `in_torch`, with an error in the log, if that or `check` raises."""
    try:
        kernel = make()
        check(kernel)
    except Exception as error:  # compilers and drivers raise whatever they like
        reason = f"{type(error).__name__}: {one_line(error)}"
        _log.error("kernel_refused kernel=%s reason=%r: plain torch does it", name, reason)
        return in_torch
    return kernel
