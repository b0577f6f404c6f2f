"""What a FakeRunner computes, as pure functions: the truth that its tokens are compared with.

A *chain* stands for all tokens up to a position, the adapter and the encoder tokens, as the keys of
a model of many layers do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

WORD = 2**64 - 1
_CHAIN = 2**62 - 1
_TOKEN_FACTOR = 0x9E3779B97F4A7C15
_POSITION_FACTOR = 0xC2B2AE3D27D4EB4F
_FACTOR = 0xD6E8FEB86659FD93
_ENCODER = 0x2545F4914F6CDD1D


def mix(chain: int, token: int, position: int) -> int:
    """The chain after `token` at `position`; 0 .. 2^62 - 1."""
    word = (chain ^ (token * _TOKEN_FACTOR + position * _POSITION_FACTOR)) & WORD
    word = (word * _FACTOR) & WORD
    return (word ^ (word >> 29)) & _CHAIN


def mix_columns(chains: UInt64Array, tokens: UInt64Array, positions: UInt64Array) -> UInt64Array:
    """`mix` of whole arrays."""
    words = chains ^ (tokens * np.uint64(_TOKEN_FACTOR) + positions * np.uint64(_POSITION_FACTOR))
    words = words * np.uint64(_FACTOR)
    return (words ^ (words >> np.uint64(29))) & np.uint64(_CHAIN)


@cache
def adapter_chain(adapter: str) -> int:
    """What an adapter makes of everything; 0 for none."""
    digest = hashlib.sha256(adapter.encode()).digest()
    return int.from_bytes(digest[:8], "little") & _CHAIN if adapter else 0


def encoder_start(adapter: str) -> int:
    """The chain before the first encoder token."""
    return adapter_chain(adapter) ^ _ENCODER


def encoder_chain(encoder: Iterable[int], adapter: str) -> int:
    """What the decoder reads of its encoder tokens; 0 if there are none."""
    tokens = list(encoder)
    chain = encoder_start(adapter)
    for position, token in enumerate(tokens):
        chain = mix(chain, token, position)
    return chain if tokens else 0


def attended(chains: Iterable[int]) -> int:
    """What attention makes of the chains within its window: each of them matters."""
    result = 0
    for index, chain in enumerate(chains):
        result = mix(result, chain, index)
    return result


def token_of(word: int, vocab_size: int, num_words: int | None = None) -> int:
    """The token that a FakeRunner makes of a mix; `num_words`: it says no more than so many."""
    return word % vocab_size if num_words is None else 1 + word % num_words


def expected_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    seed: int,
    vocab_size: int,
    *,
    adapter: str = "",
    encoder: Sequence[int] = (),
    window: int | None = None,
    num_words: int | None = None,
) -> list[int]:
    """The first `num_tokens` tokens a FakeRunner samples after `prompt`; `seed` 0 for greedy.

    `encoder`: encoder tokens. `window`: the runner's `sliding_window_tokens`; even one that is
    longer than the sequence gives other tokens than None. `num_words`: as of the runner.
    """
    cross = encoder_chain(encoder, adapter)
    start = adapter_chain(adapter) ^ cross
    chains: list[int] = []
    output: list[int] = []
    for token in prompt:
        chains.append(_next_chain(start, chains, token, window))
    for position in range(len(prompt), len(prompt) + num_tokens):
        read = chains[-1] if window is None else attended(chains[-window:])
        output.append(token_of(mix(read ^ cross, seed, position), vocab_size, num_words))
        chains.append(_next_chain(start, chains, output[-1], window))
    return output


def expected_reads(
    tokens: Sequence[int], *, adapter: str, encoder: Sequence[int], window: int | None
) -> list[int]:
    """What each of `tokens` reads, itself included; see `expected_tokens`."""
    cross = encoder_chain(encoder, adapter)
    start = adapter_chain(adapter) ^ cross
    chains: list[int] = []
    reads: list[int] = []
    for token in tokens:
        chains.append(_next_chain(start, chains, token, window))
        read = chains[-1] if window is None else attended(chains[-window:])
        reads.append(read ^ cross)
    return reads


def _next_chain(start: int, chains: Sequence[int], token: int, window: int | None) -> int:
    """A window of one token sees nothing of the tokens before."""
    before = chains[-1] if chains and window != 1 else start
    return mix(before, token, len(chains))
