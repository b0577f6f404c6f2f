"""The network of the simulation: order, cuts, resets, and machines that are gone."""

from __future__ import annotations

import asyncio
from random import Random

from tests.simulation.network import CONNECT_TIMEOUT_S, End, Frame, Network
from tests.simulation.virtual_loop import Process, new_loop

ADDRESS = "b:1"


class Pair:
    """A connection of process `a` with process `b`, and what each heard."""

    def __init__(self) -> None:
        self.loop = new_loop()
        self.network = Network(self.loop, Random(0))
        self.a, self.b = Process(self.loop, "a"), Process(self.loop, "b")
        self.heard: list[str] = []
        self.answers: list[End | str] = []
        self.far: End | None = None
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

    async def connect(self) -> End:
        self.network.connect(self.a, ADDRESS, self.answers.append)
        await asyncio.sleep(1)
        end = self.answers[-1]
        assert isinstance(end, End)
        self._note(end, "a")
        return end


def test_frames_arrive_in_their_order_when_delays_differ() -> None:
    pair = Pair()

    async def main() -> None:
        end = await pair.connect()
        for number in range(50):
            end.send((str(number),))
        await asyncio.sleep(1)

    pair.loop.run_until_complete(main())
    assert pair.heard == [f"b {number}" for number in range(50)]


def test_frames_wait_when_their_way_is_cut() -> None:
    pair = Pair()

    async def main() -> None:
        end = await pair.connect()
        pair.network.cut("a", "b")
        end.send(("waits",))
        assert pair.far is not None
        pair.far.send(("comes",))
        await asyncio.sleep(1)
        assert pair.heard == ["a comes"]
        end.send(("second",))
        pair.network.heal("a", "b")
        await asyncio.sleep(1)

    pair.loop.run_until_complete(main())
    assert pair.heard == ["a comes", "b waits", "b second"]


def test_connection_is_lost_when_it_is_cut_for_long() -> None:
    pair = Pair()

    async def main() -> None:
        await pair.connect()
        pair.network.cut("a", "b")
        await asyncio.sleep(30)

    pair.loop.run_until_complete(main())
    assert sorted(line.partition(" ")[0] for line in pair.heard) == ["a", "b"]


def test_other_end_learns_of_it_when_it_sends_on_a_dead_line() -> None:
    pair = Pair()

    async def main() -> None:
        await pair.connect()
        pair.network.reset("a", "b", is_told=False)
        await asyncio.sleep(1)
        assert pair.heard == ["a lost: Connection reset by peer"]
        assert pair.far is not None
        pair.far.send(("late",))
        await asyncio.sleep(1)

    pair.loop.run_until_complete(main())
    assert pair.heard[1:] == ["b lost: Connection reset by peer"]


def test_connection_breaks_among_what_was_sent_at_one_moment() -> None:
    pair = Pair()

    async def main() -> None:
        end = await pair.connect()
        pair.network.reset_after("a", "b", 2)
        for name in ("first", "second", "third"):
            end.send((name,))
        await asyncio.sleep(1)

    pair.loop.run_until_complete(main())
    assert pair.heard[:2] == ["b first", "b second"]
    assert sorted(pair.heard[2:]) == [f"{name} lost: Connection reset by peer" for name in "ab"]


def test_one_end_believes_in_a_connection_when_what_it_says_vanishes() -> None:
    pair = Pair()

    async def main() -> None:
        end = await pair.connect()
        assert pair.network.swallow("a", "b") == 1
        end.send(("vanishes",))
        assert pair.far is not None
        pair.far.send(("comes",))
        await asyncio.sleep(16)
        assert pair.heard == ["a comes", "b lost: keepalive watchdog timeout"]
        second = await pair.connect()
        assert second is not end
        await asyncio.sleep(15)

    pair.loop.run_until_complete(main())
    assert pair.heard[2:] == ["a lost: keepalive watchdog timeout"]


def test_connection_is_refused_when_the_process_is_dead_and_hangs_when_its_machine_is() -> None:
    times = []
    for is_silent in (False, True):
        pair = Pair()

        async def main(pair: Pair = pair, is_silent: bool = is_silent) -> None:
            pair.network.let_go(pair.b, is_silent=is_silent)
            pair.network.connect(pair.a, ADDRESS, pair.answers.append)
            while not pair.answers:  # noqa: ASYNC110 - virtual time costs nothing
                await asyncio.sleep(0.1)

        pair.loop.run_until_complete(main())
        assert isinstance(pair.answers[0], str)
        times.append(pair.loop.time())
    assert times[0] < 1
    assert CONNECT_TIMEOUT_S <= times[1] < CONNECT_TIMEOUT_S + 1
