"""Memory of the KV pools: on the device, and on the host, pinned where a GPU is to reach it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_CACHE_LINE = 64
_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts

_log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
# Pins memory until it is freed. Raises RuntimeError if that cannot be.
Pin = Callable[[Bytes], None]


def device_memory(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8. Zeros: a kernel may load a whole block and mask by multiplying.

    Raises one of several errors if there is no memory.
    """
    if device.type == "cpu":
        return host_memory(num_bytes, None)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def host_memory(num_bytes: int, pin: Pin | None) -> Tensor:
    """[num_bytes] uint8, zeros, from the start of a cache line on.

    What `pin` refuses stays pageable: slower, but it does.

    Raises MemoryError or ValueError if there is no memory.
    """
    # Unlike torch, numpy leaves it to the system to hand out zeroed pages when they are first used:
    # gigabytes cost no time at start.
    memory = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % _CACHE_LINE :][:num_bytes]
    if pin is not None and num_bytes:
        try:
            pin(memory)
        except RuntimeError as error:
            _log.warning(
                "host_pool_not_pinned num_bytes=%d gib=%.2f reason=%r: swaps are slower and do not"
                " overlap with computing; a smaller --num-host-blocks may help",
                num_bytes,
                num_bytes / 2**30,
                str(error),
            )
    return torch.from_numpy(memory)


def pin_for(device: torch.device) -> Pin | None:
    """How to pin what `device` is to reach; None where there is no need."""
    return pin_for_cuda if device.type == "cuda" else None


def pin_for_cuda(memory: Bytes) -> None:
    """See Pin. Torch's own pinned memory would take the next power of two of bytes."""
    cuda: Any = torch.cuda
    runtime, address = cuda.cudart(), memory.ctypes.data
    status = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if status != 0:
        _forget_error()
        raise RuntimeError(f"cudaHostRegister: error {status}")
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


def _forget_error() -> None:
    """The runtime keeps its last error for whoever looks next: each kernel that torch launches."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
