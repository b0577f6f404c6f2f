"""The loop and the network of the simulation: paused and dead processes, cuts, resets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from tests.simulation.network import CONNECT_TIMEOUT_S, End, Frame, Network
from tests.simulation.virtual_loop import Process, Stuck, new_loop

ADDRESS = "b:1"
RESET = "lost: Connection reset by peer"
TIMEOUT = "lost: keepalive watchdog timeout"


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

    loop.run_until_complete(main())
    assert times == [1, 11.5, 12.5]


def test_tasks_end_when_their_process_is_killed() -> None:
    loop = new_loop()

    async def main() -> None:
        process = Process(loop, "mortal")
        started = process.start(asyncio.sleep(1e9))
        process.pause()
        await asyncio.sleep(1)
        process.kill()
        await asyncio.wait([started])
        assert started.cancelled()
        assert not process.tasks

    loop.run_until_complete(main())
    assert loop.time() == 1


async def spin() -> None:
    while True:  # noqa: ASYNC110 - virtual time costs nothing
        await asyncio.sleep(0)


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("main", [spin, wait_for_ever])
def test_loop_is_stuck_when_its_time_cannot_pass(main: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(Stuck):
        new_loop().run_until_complete(main())


class Pair:
    """Connections of process `a` with process `b`, and what each heard."""

    def __init__(self) -> None:
        self.loop = new_loop()
        self.network = Network(self.loop, Random(0))
        self.a, self.b = Process(self.loop, "a"), Process(self.loop, "b")
        self.heard: list[str] = []
        self.answers: list[End | str] = []
        # The latest end of each.
        self.near = self.far = End(self.network, self.a)
        self.network.listen(ADDRESS, self._accept, self.b)

    def _accept(self, end: End) -> None:
        self.far = end
        self._note(end, "b")
        end.send(("settings",))

    def _note(self, end: End, name: str) -> None:
        def hear(frame: Frame) -> None:
            self.heard.append(f"{name} {frame[0]}")

        end.on_frame = hear
        end.on_lost = lambda problem: self.heard.append(f"{name} lost: {problem}")

    async def connect(self) -> None:
        self.network.connect(self.a, ADDRESS, self.answers.append)
        await asyncio.sleep(1)
        end = self.answers[-1]
        assert isinstance(end, End)
        self.near = end
        self._note(end, "a")

    async def say(self, end: End, *names: str) -> list[str]:
        """Sends frames, and returns what was heard until a second later."""
        already = len(self.heard)
        for name in names:
            end.send((name,))
        await asyncio.sleep(1)
        return self.heard[already:]


async def keep_order(pair: Pair) -> None:
    names = [str(number) for number in range(50)]
    assert await pair.say(pair.near, *names) == [f"b {name}" for name in names]


async def wait_while_cut(pair: Pair) -> None:
    pair.network.cut("a", "b")
    assert await pair.say(pair.near, "waits") == []
    assert await pair.say(pair.far, "comes") == ["a comes"]
    pair.network.heal("a", "b")
    assert await pair.say(pair.near, "second") == ["b waits", "b second"]


async def lose_when_cut_for_long(pair: Pair) -> None:
    pair.network.cut("a", "b")
    await asyncio.sleep(30)
    assert sorted(line[0] for line in pair.heard) == ["a", "b"]


async def hear_of_reset_when_sending(pair: Pair) -> None:
    pair.network.reset("a", "b", is_told=False)
    assert await pair.say(pair.near) == [f"a {RESET}"]
    assert await pair.say(pair.far, "late") == [f"b {RESET}"]


async def break_within_a_message(pair: Pair) -> None:
    pair.network.reset_after("a", "b", 2)
    heard = await pair.say(pair.near, "first", "second", "third")
    assert heard[:2] == ["b first", "b second"]
    assert sorted(heard[2:]) == [f"a {RESET}", f"b {RESET}"]


async def swallow_one_way(pair: Pair) -> None:
    assert pair.network.swallow("a", "b") == 1
    former = pair.near
    assert await pair.say(pair.near, "vanishes") == []
    assert await pair.say(pair.far, "comes") == ["a comes"]
    await asyncio.sleep(15)
    assert pair.heard[1:] == [f"b {TIMEOUT}"]
    await pair.connect()
    assert pair.near is not former
    await asyncio.sleep(15)
    assert pair.heard[2:] == [f"a {TIMEOUT}"]


@pytest.mark.parametrize(
    "story",
    [
        keep_order,
        wait_while_cut,
        lose_when_cut_for_long,
        hear_of_reset_when_sending,
        break_within_a_message,
        swallow_one_way,
    ],
)
def test_connection_does_as_tcp(story: Callable[[Pair], Awaitable[None]]) -> None:
    pair = Pair()

    async def main() -> None:
        await pair.connect()
        await story(pair)

    pair.loop.run_until_complete(main())


@pytest.mark.parametrize(("is_silent", "least_s"), [(False, 0), (True, CONNECT_TIMEOUT_S)])
def test_connection_is_refused_or_hangs_when_nobody_listens(
    is_silent: bool, least_s: float
) -> None:
    pair = Pair()

    async def main() -> None:
        pair.network.let_go(pair.b, is_silent=is_silent)
        pair.network.connect(pair.a, ADDRESS, pair.answers.append)
        while not pair.answers:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(0.1)

    pair.loop.run_until_complete(main())
    assert isinstance(pair.answers[0], str)
    assert least_s <= pair.loop.time() < least_s + 1
