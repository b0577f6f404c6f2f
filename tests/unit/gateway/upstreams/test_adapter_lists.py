"""Lists of adapters: cached for each caller, and read again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from splitserve_client import Adapter, ServerUnreachable
from splitserve_gateway.upstreams import AdapterLists, adapter_lists


class Scheduler:
    """Lists `names` to everybody, once it `answers`. `asked`: with which credentials."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []
        self.now_s = 0.0
        self.answers = asyncio.Event()
        self.answers.set()
        self.lists = AdapterLists(self._list, lambda: self.now_s)

    async def _list(self, credential: str) -> Sequence[Adapter]:
        self.asked.append(credential)
        await self.answers.wait()
        if not self.names:
            raise ServerUnreachable("it is gone")
        return [Adapter(name, f"/{name}", "", "") for name in self.names]


async def test_list_is_read_once_when_it_is_new() -> None:
    scheduler = Scheduler("a")
    for _ in range(3):
        assert list(await scheduler.lists.read("x")) == ["a"]
    await scheduler.lists.read("y", "b")
    assert scheduler.asked == ["x", "y"]


async def test_list_is_read_again_when_it_is_old() -> None:
    scheduler = Scheduler("a")
    await scheduler.lists.read("")
    scheduler.names, scheduler.now_s = ("a", "b"), 1.0
    assert list(await scheduler.lists.read("")) == ["a", "b"]


async def test_old_list_is_enough_when_it_has_the_name() -> None:
    scheduler = Scheduler("a")
    await scheduler.lists.read("")
    scheduler.names, scheduler.now_s = ("b",), 60.0
    scheduler.answers.clear()
    assert "a" in await scheduler.lists.read("", "a")
    scheduler.answers.set()
    # Meanwhile it was read again.
    assert list(await scheduler.lists.read("", "b")) == ["b"]
    assert len(scheduler.asked) == 2


async def test_list_is_read_once_when_several_wait_for_it() -> None:
    scheduler = Scheduler("a")
    scheduler.answers.clear()
    reading = [asyncio.create_task(scheduler.lists.read("")) for _ in range(3)]
    await asyncio.sleep(0)
    reading[0].cancel()
    scheduler.answers.set()
    found = await asyncio.gather(*reading, return_exceptions=True)
    assert [list(each) for each in found[1:] if not isinstance(each, BaseException)] == [["a"]] * 2
    assert len(scheduler.asked) == 1


async def test_old_list_stays_when_the_scheduler_does_not_answer() -> None:
    scheduler = Scheduler()
    assert await scheduler.lists.read("") == {}
    scheduler.names, scheduler.now_s = ("a",), 1.0
    await scheduler.lists.read("")
    scheduler.names, scheduler.now_s = (), 2.0
    assert list(await scheduler.lists.read("")) == ["a"]


async def test_list_is_read_again_when_adapters_were_loaded() -> None:
    scheduler = Scheduler("a")
    await scheduler.lists.read("")
    scheduler.names = ("b",)
    scheduler.lists.forget()
    assert list(await scheduler.lists.read("")) == ["b"]


async def test_lists_of_others_are_dropped_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_lists, "_MAX_CACHED", 6)
    scheduler = Scheduler("a", "b")
    for credential in ("x", "y", "z", "x"):
        await scheduler.lists.read(credential)
    assert scheduler.asked == ["x", "y", "z", "x"]
    await scheduler.lists.read("z")
    assert len(scheduler.asked) == 4


async def test_reading_ends_when_the_lists_are_closed() -> None:
    scheduler = Scheduler("a")
    scheduler.answers.clear()
    reading = asyncio.create_task(scheduler.lists.read(""))
    await asyncio.sleep(0)
    await scheduler.lists.close()
    with pytest.raises(asyncio.CancelledError):
        await reading
