"""What a compiled kernel takes of a multiprocessor, and what it may take."""

from __future__ import annotations

from dataclasses import dataclass

# By compute capability: shared memory of a multiprocessor, and of one program at most.
_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
SHARED_BYTES = {capability: 1024 * kib for capability, kib in _KIB.items()}
RESERVED_SHARED_BYTES = 1024
_REGISTERS = 65536
# Registers are given to warps in portions.
_PORTION = 256
_THREADS_PER_WARP = 32


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one program: `registers` of each thread, what did not fit there, shared memory.

    `loads_ahead`: how many loads to shared memory may be under way while a loop computes. Hopper:
    `exponents_beside_products`, exponentials between the begin of a product and the wait for it;
    `is_serial`, whether the assembler made each product wait for the one before.
    """

    kernel: str
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    loads_ahead: int = 0
    exponents_beside_products: int = 0
    is_serial: bool = False

    def programs_at_once(self, capability: int) -> int:
        """That fit on a multiprocessor."""
        shared_bytes = self.shared_bytes + RESERVED_SHARED_BYTES
        by_memory = SHARED_BYTES[capability] // shared_bytes
        registers = -(-self.registers * _THREADS_PER_WARP // _PORTION) * _PORTION
        return min(by_memory, _REGISTERS // (registers * self.num_warps))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a program may take, and how many loads it has ahead at least.

    By default what the hardware has, and next to nothing spilled.
    """

    registers: int = 255
    spilled_bytes: int = 16
    shared_bytes: int | None = None
    loads_ahead: int = 0

    def why_not(self, found: Resources, capability: int) -> str | None:
        """What is beyond the bounds; None if nothing is."""
        most = SHARED_BYTES[capability] - RESERVED_SHARED_BYTES
        if self.shared_bytes is not None:
            most = min(most, self.shared_bytes)
        for name, number, bound in (
            ("registers", found.registers, self.registers),
            ("spilled_bytes", found.spilled_bytes, self.spilled_bytes),
            ("shared_bytes", found.shared_bytes, most),
        ):
            if number > bound:
                return f"{found.kernel}: {name} is {number}, allowed: at most {bound}"
        if found.loads_ahead < self.loads_ahead:
            ahead = f"{found.loads_ahead}, allowed: at least {self.loads_ahead}"
            return f"{found.kernel}: loads_ahead is {ahead}"
        return None
