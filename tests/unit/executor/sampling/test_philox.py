from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.sampling.sampler import philox_4x32_10, uniform

# Known answers published with the Random123 library: (counter, key, result).
KNOWN_ANSWERS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox on Python's integers, one counter at a time."""
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


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words_when_given_a_known_counter(
    counter: str, key: str, expected: str
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in _words(counter))
    k0, k1 = (torch.tensor([word]) for word in _words(key))
    result = philox_4x32_10((c0, c1, c2, c3), (k0, k1))
    assert [word.item() for word in result] == _words(expected)


def test_uniform_follows_the_contract_when_seeds_use_all_bits() -> None:
    seeds = [0, 1, -1, -(2**63), 2**63 - 1, 0x1234_5678_9ABC_DEF0]
    positions = [0, 1, 77, 2**31 - 1, 5, 2**32 + 3]
    expected = []
    for seed, position in zip(seeds, positions, strict=True):
        bits = seed % 2**64
        a, b, _, _ = _philox([position % 2**32, position >> 32, 0, 0], [bits % 2**32, bits >> 32])
        expected.append((a * 2**21 + (b >> 11)) / 2**53)
    assert uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_uniform_is_flat_when_positions_run() -> None:
    u = uniform(torch.full((20_000,), 42), torch.arange(20_000)).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    counts, _ = np.histogram(u, bins=50, range=(0, 1))
    # 0.999 quantile of chi-square with 49 degrees of freedom.
    assert ((counts - 400) ** 2 / 400).sum() < 85.4
