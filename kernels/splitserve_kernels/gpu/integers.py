"""Integer arithmetic for launches: Triton's own functions take microseconds each on the host."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """Returns `number` / `divisor`, rounded up; both are positive, or `number` is 0."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least `number` and at least 1."""
    return 1 << max(0, number - 1).bit_length()
