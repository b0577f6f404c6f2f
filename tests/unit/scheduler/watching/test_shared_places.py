"""Who gives up a place, beside a list that is looked through each time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.watching.life import Life
from scheduler_service.watching.life_recorder import SharedPlaces

NUM_PLACES = 5


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), max_size=60),
    st.booleans(),
)
def test_whoever_has_most_gives_a_place_when_all_are_taken(
    added: list[tuple[str, int]], gives_oldest: bool
) -> None:
    places = SharedPlaces(NUM_PLACES, gives_oldest=gives_oldest)
    kept: list[tuple[str, str]] = []  # tenant and key, oldest first
    for tenant, number in added:
        key = f"{tenant}{number}"
        places.add(Life(key, key, tenant, 0))
        if (tenant, key) in kept:
            kept.remove((tenant, key))
        kept.append((tenant, key))
        if len(kept) > NUM_PLACES:
            numbers = Counter(each for each, _ in kept)
            in_turn = kept if gives_oldest else kept[::-1]
            assert sum(places.get(k) is None for _, k in kept) == 1
            lost = next(each for each in kept if places.get(each[1]) is None)
            assert numbers[lost[0]] == max(numbers.values())
            assert lost == next(each for each in in_turn if each[0] == lost[0])
            kept.remove(lost)
        assert len(places) == len(kept)

    assert sorted(life.key for life in places) == sorted(key for _, key in kept)
