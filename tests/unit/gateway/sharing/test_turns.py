"""Shares of a bounded resource, and turns at a place."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_gateway.sharing import FairSemaphore, Shares, TooManyWait


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
def test_shares_never_exceed_the_whole_and_serve_newcomers(
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


class Visitors:
    """Those who want a place; `order`: who got one."""

    def __init__(self, places: FairSemaphore) -> None:
        self.places = places
        self.order: list[str] = []
        self.may_leave = asyncio.Event()

    async def visit(self, party: str) -> None:
        async with self.places.place(party):
            self.order.append(party)
            await self.may_leave.wait()

    async def come(self, parties: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.visit(party)) for party in parties]
        await asyncio.sleep(0)
        return tasks


async def test_parties_take_turns_however_many_wait_of_one() -> None:
    visitors = Visitors(FairSemaphore(1, 100))
    tasks = await visitors.come("aaaaabbc")
    visitors.may_leave.set()
    await asyncio.gather(*tasks)
    assert "".join(visitors.order) == "aabcabaa"


async def test_place_goes_to_the_next_when_whoever_waits_leaves() -> None:
    visitors = Visitors(FairSemaphore(1, 100))
    first, second, third = await visitors.come("abc")
    # One leaves while it waits, another at the moment when it has its turn.
    second.cancel()
    visitors.may_leave.set()
    first.cancel()
    await asyncio.sleep(0)
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert visitors.order == ["a", "c"]
    await asyncio.gather(*await visitors.come("d"))
    assert visitors.order == ["a", "c", "d"]


async def test_place_is_not_lost_when_its_waiter_leaves_in_turn() -> None:
    visitors = Visitors(FairSemaphore(1, 100))
    first, second = await visitors.come("ab")
    visitors.may_leave.set()
    await asyncio.sleep(0)
    # `a` has left by now and handed its place on; `b` has not run since.
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await asyncio.gather(*await visitors.come("c"))
    assert visitors.order == ["a", "c"]


async def test_queue_is_bounded_and_one_party_leaves_some_of_it() -> None:
    visitors = Visitors(FairSemaphore(1, 20))
    greedy = await visitors.come("a" * 40)
    refused = [task for task in greedy if task.done()]
    assert len(refused) in range(20, 25)
    for task in refused:
        with pytest.raises(TooManyWait):
            task.result()
    (other,) = await visitors.come("b")
    assert not other.done()
    visitors.may_leave.set()
    await asyncio.gather(other, *(task for task in greedy if task not in refused))
    assert visitors.order[:3] == ["a", "a", "b"]
