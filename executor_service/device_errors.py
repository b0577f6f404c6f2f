"""Which errors of a forward pass or an allocation are about the device, not about the input."""

from __future__ import annotations

import torch

from executor_service.errors import OutOfMemory, StepFailed


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)):
        return True
    # The CPU allocator of torch has no exception type of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_beyond_rows(error: BaseException) -> bool:
    """Whether no single row can explain `error`: no memory, or a device that is lost."""
    return is_out_of_memory(error) or isinstance(error, (torch.AcceleratorError, StepFailed))
