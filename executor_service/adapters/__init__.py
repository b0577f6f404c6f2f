"""LoRA adapters: reading, checking and holding them."""

from executor_service.adapters.reading import read_adapter
from executor_service.adapters.store import AdapterStore
from executor_service.adapters.targets import (
    aligned_targets,
    find_targets,
    is_transposed,
    short_name,
)

__all__ = [
    "AdapterStore",
    "aligned_targets",
    "find_targets",
    "is_transposed",
    "read_adapter",
    "short_name",
]
