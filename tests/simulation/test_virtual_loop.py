"""The loop of the simulation: virtual time, and processes that are paused and killed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from tests.simulation.virtual_loop import Process, Stuck, VirtualLoop, new_loop


def run(main: Coroutine[object, object, object], loop: VirtualLoop) -> object:
    return loop.run_until_complete(main)


def test_time_passes_at_once_when_all_wait() -> None:
    loop = new_loop()

    async def main() -> list[str]:
        order: list[str] = []

        async def say(text: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            order.append(text)

        await asyncio.gather(say("late", 1e6), say("soon", 0.1), say("now", 0))
        return order

    assert run(main(), loop) == ["now", "soon", "late"]
    assert loop.time() == 1e6


def test_timeout_comes_when_its_time_is_there() -> None:
    loop = new_loop()

    async def main() -> None:
        async with asyncio.timeout(5):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(main(), loop)
    assert loop.time() == 5


def test_process_does_nothing_when_it_is_paused() -> None:
    loop, times = new_loop(), list[float]()

    async def tick() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            times.append(loop.time())

    async def main() -> None:
        process = Process(loop, "ticking")
        ticking = process.start(tick())
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(10)
        process.resume()
        await ticking

    run(main(), loop)
    assert times == [1, 11.5, 12.5]


def test_tasks_end_when_their_process_is_killed() -> None:
    loop = new_loop()

    async def main() -> Process:
        process = Process(loop, "mortal")
        started = process.start(asyncio.sleep(1e9))
        process.pause()
        await asyncio.sleep(1)
        process.kill()
        await asyncio.wait([started])
        assert started.cancelled()
        return process

    process = run(main(), loop)
    assert isinstance(process, Process)
    assert not process.tasks
    assert loop.time() == 1


def test_loop_says_so_when_nothing_can_happen_any_more() -> None:
    with pytest.raises(Stuck):
        run(asyncio.Event().wait(), new_loop())


def test_loop_says_so_when_something_goes_on_for_ever_at_one_instant() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(0)

    with pytest.raises(Stuck):
        run(main(), new_loop())
