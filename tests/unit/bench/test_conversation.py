"""Workloads that are drawn: distributions, prompts and limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.workloads import (
    Conversation,
    Distribution,
    Limits,
    PromptPiece,
    PromptTokens,
    SharedPrefix,
    SyntheticLoad,
)


def draws(text: str, number: int = 4000) -> list[float]:
    rng = np.random.default_rng(1)
    distribution = Distribution.parse(text)
    return [distribution.draw(rng) for _ in range(number)]


def test_distribution_is_constant_when_it_is_a_number() -> None:
    assert set(draws("512", 10)) == {512.0}


def test_distribution_has_the_range_when_it_is_uniform() -> None:
    values = draws("uniform:10:20")

    assert 10 <= min(values) < 10.1
    assert 19.9 < max(values) <= 20


def test_lognormal_has_the_median_and_a_long_tail() -> None:
    values = draws("lognormal:500:1.2")

    assert np.median(values) == pytest.approx(500, rel=0.1)
    # exp(1.2 * 2.326), by the normal distribution.
    assert np.quantile(values, 0.99) / np.median(values) == pytest.approx(16.3, rel=0.2)


def test_distribution_has_the_mean_when_it_is_exponential() -> None:
    assert np.mean(draws("exponential:2.5")) == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "uniform:1", "uniform:2:1", "lognormal:0:1", "normal:1:2", "inf", "1:2"]
)
def test_distribution_is_refused_when_malformed(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        Distribution.parse(text)


def test_count_keeps_within_its_limits() -> None:
    rng = np.random.default_rng(1)

    assert Distribution.parse("0").draw_count(rng) == 1
    assert Distribution.parse("70").draw_count(rng, largest=60) == 60
    assert Distribution.parse("2.6").draw_count(rng) == 3


LOAD = SyntheticLoad(
    Distribution.parse("lognormal:100:1"),
    Distribution.parse("uniform:5:50"),
    SharedPrefix(64, 3),
    Distribution.parse("uniform:1:5"),
    Distribution.parse("exponential:2"),
    conversations_per_s=4.0,
)


def drawn(load: SyntheticLoad, number: int, seed: int = 1) -> list[Conversation]:
    return list(islice(load.conversations(seed), number))


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_burstiness(burstiness: float) -> None:
    load = SyntheticLoad(conversations_per_s=4.0, burstiness=burstiness)

    times = [conversation.arrival_s for conversation in drawn(load, 8000)]

    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1, abs=1e-6)


def test_requests_depend_on_the_seed_and_not_the_rate() -> None:
    slow, fast = drawn(LOAD, 50), drawn(replace(LOAD, conversations_per_s=40.0), 50)

    assert [each.turns for each in slow] == [each.turns for each in fast]
    assert drawn(LOAD, 50) == slow
    assert drawn(LOAD, 50, seed=2) != slow


def test_first_turns_share_only_the_group_prefix() -> None:
    conversations = drawn(LOAD, 300)

    prefixes = [conversation.turns[0].pieces[0] for conversation in conversations]
    own = [turn.pieces[-1].key for each in conversations for turn in each.turns]
    assert {prefix.num_tokens for prefix in prefixes} == {64}
    assert len({prefix.key for prefix in prefixes}) == 3
    assert len(set(own)) == len(own)
    assert all(len(turn.pieces) == 1 for each in conversations for turn in each.turns[1:])


def test_later_turns_come_after_a_while() -> None:
    turns = [each.turns for each in drawn(LOAD, 2000)]

    assert all(first.think_s == 0 for first, *_ in turns)
    later = [turn.think_s for _, *rest in turns for turn in rest]
    assert np.mean(later) == pytest.approx(2, rel=0.1)


def test_limits_end_a_workload_by_number_and_by_time() -> None:
    everything = drawn(replace(LOAD, burstiness=0.0), 100)

    assert list(Limits(7).apply(iter(everything))) == everything[:7]
    assert len(list(Limits(duration_s=2.0).apply(iter(everything)))) == 8
    # Twice as fast, twice as many in the same time.
    assert len(list(Limits(duration_s=2.0, speed=2.0).apply(iter(everything)))) == 16


def test_limits_cut_prompts_and_answers() -> None:
    (conversation,) = drawn(LOAD, 1)

    (cut,) = Limits(1, max_prompt_tokens=70, max_output_tokens=3).apply(iter([conversation]))

    first = cut.turns[0]
    assert first.pieces[0] == conversation.turns[0].pieces[0]
    assert first.num_new_tokens == min(70, conversation.turns[0].num_new_tokens)
    assert {turn.num_output_tokens for turn in cut.turns} == {3}
    (shorter,) = Limits(1, max_prompt_tokens=10).apply(iter([conversation]))
    assert [piece.num_tokens for piece in shorter.turns[0].pieces] == [10]


KEYS = st.integers(-(2**62), 2**62)
LENGTHS = st.integers(0, 300)


@given(st.lists(st.tuples(KEYS, LENGTHS), max_size=6), st.integers(0, 2**80))
def test_tokens_follow_from_salt_and_pieces_whatever_came_before(
    pieces: list[tuple[int, int]], salt: int
) -> None:
    made = [PromptPiece(key, number) for key, number in pieces]
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
    first, second = (tokens.of([PromptPiece(key, number)]) for number in (one, other))

    assert all(a == b for a, b in zip(first, second, strict=False))


def test_tokens_are_others_when_the_salt_or_the_key_is() -> None:
    prompts = [
        PromptTokens(salt, 0, 1000).of([PromptPiece(key, 20)])
        for salt, key in ((1, 1), (1, 2), (2, 1), (1, -1))
    ]

    assert len(set(map(tuple, prompts))) == 4


def test_cached_pieces_are_bounded_and_reproducible() -> None:
    tokens = PromptTokens(1, 0, 1000)
    first = tokens.of([PromptPiece(0, 10)])
    for key in range(5000):
        tokens.of([PromptPiece(key, 3)])

    assert tokens.of([PromptPiece(0, 10)]) == first
