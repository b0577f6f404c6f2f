"""Availability of the kernels of this package; imports no Triton itself.

Call `why_unavailable()` before importing a module that needs Triton.
"""

from __future__ import annotations

import importlib.util
import os

import torch


def why_unavailable() -> str | None:
    """Returns why the kernels cannot run; None if they can.

    Without a CUDA device they run in Triton's interpreter, if TRITON_INTERPRET=1 was set before
    Triton was first imported.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() or is_interpreted():
        return None
    return "there is no CUDA device, and TRITON_INTERPRET=1 is not set"


def is_interpreted() -> bool:
    """Returns whether kernels run on the CPU, one program after the other, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
