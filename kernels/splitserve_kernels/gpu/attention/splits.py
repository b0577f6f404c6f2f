"""How many programs share the keys of one row."""

from __future__ import annotations

import functools

import torch

MAX_NUM_SPLITS = 64
# With fewer keys, a split costs more (a launch, its partial sums) than it saves.
_MIN_TOKENS_PER_SPLIT = 256
# Programs that a multiprocessor should have, to load from memory while others compute.
_PROGRAMS_PER_MULTIPROCESSOR = 2


def choose_num_splits(num_programs: int, num_tokens: int, num_multiprocessors: int) -> int:
    """Into how many parts the keys of each row go: a power of two, at most MAX_NUM_SPLITS.

    `num_programs`: how many there are without splits. `num_tokens`: keys of the longest row. The
    parts double while the device has room for as many programs and a part keeps enough keys.
    """
    room = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    num_splits = 1
    while (
        num_splits < MAX_NUM_SPLITS
        and 2 * num_splits * num_programs <= room
        and 2 * num_splits * _MIN_TOKENS_PER_SPLIT <= num_tokens
    ):
        num_splits *= 2
    return num_splits


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
