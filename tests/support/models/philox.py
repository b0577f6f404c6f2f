"""The contract's random numbers in plain Python: Philox4x32-10 on integers."""

from __future__ import annotations


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Returns the four words of 32 bits for a counter of four and a key of two."""
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (product1 >> 32) ^ c[1] ^ k[0],
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c[3] ^ k[1],
            product0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def random_number(seed: int, position: int) -> float:
    """Returns the number in [0, 1) by which the token at `position` of a sequence is drawn."""
    bits = seed % 2**64
    a, b, _, _ = philox([position % 2**32, position >> 32, 0, 0], [bits % 2**32, bits >> 32])
    return (a * 2**21 + (b >> 11)) / 2**53
