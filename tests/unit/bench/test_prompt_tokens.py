"""What prompts are made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.workloads.conversation import Piece, PromptTokens

KEYS = st.integers(-(2**62), 2**62)
LENGTHS = st.integers(0, 300)


@given(st.lists(st.tuples(KEYS, LENGTHS), max_size=6), st.integers(0, 2**80))
def test_tokens_follow_from_salt_and_pieces_whatever_came_before(
    pieces: list[tuple[int, int]], salt: int
) -> None:
    made = [Piece(key, number) for key, number in pieces]
    known = PromptTokens(salt, 10, 50)
    for piece in reversed(made):
        known.of([piece])

    tokens = known.of(made)

    assert tokens == PromptTokens(salt, 10, 50).of(made)
    assert len(tokens) == sum(piece.num_tokens for piece in made)
    assert all(10 <= token_id < 50 for token_id in tokens)


@given(KEYS, LENGTHS, LENGTHS)
def test_shorter_piece_begins_as_a_longer_one(key: int, one: int, other: int) -> None:
    tokens = PromptTokens(3, 0, 1000)
    first, second = (tokens.of([Piece(key, number)]) for number in (one, other))

    assert all(a == b for a, b in zip(first, second, strict=False))


def test_tokens_are_others_when_the_salt_or_the_key_is() -> None:
    prompts = [
        PromptTokens(salt, 0, 1000).of([Piece(key, 20)])
        for salt, key in ((1, 1), (1, 2), (2, 1), (1, -1))
    ]

    assert len(set(map(tuple, prompts))) == 4


def test_no_more_than_so_many_pieces_are_kept_and_all_come_again() -> None:
    tokens = PromptTokens(1, 0, 1000)
    first = tokens.of([Piece(0, 10)])
    for key in range(5000):
        tokens.of([Piece(key, 3)])

    assert tokens.of([Piece(0, 10)]) == first
