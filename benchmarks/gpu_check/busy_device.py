"""A device that has something to do for longer than any call may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# 1.4 ms each on an H100: some 40 ms.
_NUM_PRODUCTS = 30
_SIZE = 8192


@contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Inside, what is asked of the device has to wait; it is idle afterwards."""
    if device.type != "cuda":
        yield
        return
    a = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
    product = a @ a
    torch.cuda.synchronize(device)
    for _ in range(_NUM_PRODUCTS):
        torch.mm(a, a, out=product)
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
