"""Philox4x32-10, a counter-based random source: bits are a function of (seed, position) alone.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

A 32-bit word is an int64 in 0 .. 2^32 - 1, which CPU and CUDA treat alike. Shape letter: S samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

Words2 = tuple[Tensor, Tensor]
Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32_10(counter: Words4, key: Words2) -> Words4:
    """Four random words for each counter. All tensors: [S] int64 of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _KEY_INCREMENTS[0]) & _WORD
        k1 = (k1 + _KEY_INCREMENTS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) with 53 random bits, as `SamplingParams` in `executor.proto` defines u.

    `seeds`: [S] int64, its bits taken as unsigned. `positions`: [S] int64, >= 0. Returns [S]
    float64.
    """
    zero = torch.zeros_like(positions)
    counter = (positions & _WORD, (positions >> 32) & _WORD, zero, zero)
    a, b, _, _ = philox_4x32_10(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    return ((a << 21) + (b >> 11)).to(torch.float64) * 2.0**-53


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product."""
    # The product may wrap to a negative int64; its bits are right, and the masks drop the sign.
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD
