"""Whose turn it is where places are few."""

from __future__ import annotations

import asyncio

import pytest

from splitserve_gateway.sharing.turns import TooManyWait, TurnPlaces


class Visitors:
    """Those who want a place; `order`: who got one."""

    def __init__(self, places: TurnPlaces) -> None:
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
    visitors = Visitors(TurnPlaces(1, 100))
    tasks = await visitors.come("aaaaabbc")
    visitors.may_leave.set()
    await asyncio.gather(*tasks)
    assert "".join(visitors.order) == "aabcabaa"


async def test_place_goes_to_the_next_when_whoever_waits_leaves() -> None:
    visitors = Visitors(TurnPlaces(1, 100))
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


async def test_place_is_not_lost_when_its_turn_comes_as_the_one_who_waits_leaves() -> None:
    visitors = Visitors(TurnPlaces(1, 100))
    first, second = await visitors.come("ab")
    visitors.may_leave.set()
    await asyncio.sleep(0)
    # `a` has left by now and handed its place on; `b` has not run since.
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await asyncio.gather(*await visitors.come("c"))
    assert visitors.order == ["a", "c"]


async def test_queue_is_bounded_and_one_party_leaves_some_of_it() -> None:
    visitors = Visitors(TurnPlaces(1, 20))
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
