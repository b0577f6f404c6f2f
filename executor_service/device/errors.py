"""Errors that are about the device and not about the input, and how to recover from them."""

from __future__ import annotations

import torch

from executor_service.errors import OutOfMemory, StepFailed

# What has no exception type of its own: the CPU allocator of torch, and libraries on a GPU.
_NO_MEMORY_TEXTS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY_TEXTS)


def is_beyond_rows(error: BaseException) -> bool:
    """Whether no single row can explain `error`: no memory, or a device that is lost."""
    return is_out_of_memory(error) or isinstance(error, (torch.AcceleratorError, StepFailed))


def release_cached_memory(device: torch.device) -> None:
    """Gives back what torch keeps for reuse on `device`, so that pieces of it can be had as one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
