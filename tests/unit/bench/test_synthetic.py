"""Workloads that are drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from splitserve_bench.workloads.conversation import (
    Conversation,
    Distribution,
    Limits,
    SharedPrefix,
    SyntheticLoad,
)

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
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness: float) -> None:
    load = SyntheticLoad(conversations_per_s=4.0, burstiness=burstiness)

    times = [conversation.arrival_s for conversation in drawn(load, 8000)]

    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1, abs=1e-6)


def test_requests_are_the_same_when_the_seed_is_and_the_rate_is_not() -> None:
    slow, fast = drawn(LOAD, 50), drawn(replace(LOAD, conversations_per_s=40.0), 50)

    assert [each.turns for each in slow] == [each.turns for each in fast]
    assert drawn(LOAD, 50) == slow
    assert drawn(LOAD, 50, seed=2) != slow


def test_first_turns_share_a_prefix_with_their_group_and_nothing_else() -> None:
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


def test_limits_cut_the_end_of_a_prompt_and_the_length_of_an_answer() -> None:
    (conversation,) = drawn(LOAD, 1)

    (cut,) = Limits(1, max_prompt_tokens=70, max_output_tokens=3).apply(iter([conversation]))

    first = cut.turns[0]
    assert first.pieces[0] == conversation.turns[0].pieces[0]
    assert first.num_new_tokens == min(70, conversation.turns[0].num_new_tokens)
    assert {turn.num_output_tokens for turn in cut.turns} == {3}
    (shorter,) = Limits(1, max_prompt_tokens=10).apply(iter([conversation]))
    assert [piece.num_tokens for piece in shorter.turns[0].pieces] == [10]
