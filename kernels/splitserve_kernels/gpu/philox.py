"""Random numbers of `SamplingParams` in a kernel: Philox4x32-10.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import triton
import triton.language as tl

_WORD = tl.constexpr(0xFFFFFFFF)
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_INCREMENT_0 = tl.constexpr(0x9E3779B9)
_KEY_INCREMENT_1 = tl.constexpr(0xBB67AE85)
_NUM_ROUNDS = tl.constexpr(10)
_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Returns a float64 in [0, 1) with 53 random bits.

    `seed`, `position`: int64, with bits taken as unsigned. Words of 32 bits are kept in uint64,
    which holds the product of two words.
    """
    key_0 = seed.to(tl.uint64) & _WORD
    key_1 = seed.to(tl.uint64) >> 32
    a = position.to(tl.uint64) & _WORD
    b = position.to(tl.uint64) >> 32
    c = a * 0
    d = a * 0
    for _ in tl.static_range(_NUM_ROUNDS):
        product_0 = a * _MULTIPLIER_0
        product_1 = c * _MULTIPLIER_1
        a = (product_1 >> 32) ^ b ^ key_0
        b = product_1 & _WORD
        c = (product_0 >> 32) ^ d ^ key_1
        d = product_0 & _WORD
        key_0 = (key_0 + _KEY_INCREMENT_0) & _WORD
        key_1 = (key_1 + _KEY_INCREMENT_1) & _WORD
    bits = (a << 21) + (b >> 11)
    return bits.to(tl.int64).to(tl.float64) * _UNIT
