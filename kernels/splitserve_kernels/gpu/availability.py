"""Whether the kernels of this package can run here; the only module that needs no Triton.

A caller asks `why_unavailable()`, and imports the others of this package only if it is None.
"""

from __future__ import annotations

import importlib.util
import os

import torch


def why_unavailable() -> str | None:
    """None if the kernels can run, otherwise the reason in words.

    Without a CUDA device they run in Triton's interpreter, if TRITON_INTERPRET=1 was set before
    Triton was first imported.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() or is_interpreted():
        return None
    return "there is no CUDA device, and TRITON_INTERPRET=1 is not set"


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, one program after the other, to be tested."""
    return os.environ.get("TRITON_INTERPRET") == "1"
