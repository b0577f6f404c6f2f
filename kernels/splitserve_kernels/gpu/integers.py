"""Integer arithmetic of launchers: Triton's own functions take microseconds each on the host."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """`number` / `divisor`, rounded up; both are positive, or `number` is 0."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is `number` or more; 1 at least."""
    return 1 << max(0, number - 1).bit_length()
