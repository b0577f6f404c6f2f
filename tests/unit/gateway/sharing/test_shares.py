"""Who may have how much of what is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve_gateway.sharing.turns import Shares


def take_all(shares: Shares, party: str | None) -> int:
    num = 0
    while shares.may_take(party, 1):
        shares.take(party, 1)
        num += 1
    return num


def test_one_party_leaves_a_seventeenth_and_the_next_finds_it() -> None:
    shares = Shares(400)
    assert 370 <= take_all(shares, "greedy") <= 377
    assert take_all(shares, "other") >= 20
    shares.give_back("greedy", 300)
    assert shares.may_take("greedy", 1)


def test_all_may_be_taken_where_parties_are_not_told_apart() -> None:
    shares = Shares(400)
    assert take_all(shares, None) == 400
    assert not shares.may_take("other", 1)


@given(st.integers(1, 200), st.lists(st.sampled_from("abc"), max_size=300))
def test_never_more_than_there_is_and_one_who_has_nothing_gets_what_is_left(
    num_all: int, parties: list[str]
) -> None:
    shares = Shares(num_all)
    held = dict.fromkeys("abc", 0)
    for party in parties:
        if shares.may_take(party, 1):
            shares.take(party, 1)
            held[party] += 1
        assert sum(held.values()) == shares.num_held <= num_all
        assert shares.may_take("new", 1) == (shares.num_held < num_all)
    for party, num in held.items():
        if num:
            shares.give_back(party, num)
    assert shares.num_held == 0
