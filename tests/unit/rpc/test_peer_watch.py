"""A watch over a peer, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from splitserve_rpc import QUIET_S, SILENT_AFTER_S, TICK_S, PeerState, PeerWatch, is_answer
from tests.simulation.calls import rpc_error


@dataclass
class Peer:
    """A peer that answers or not, and the watch over it. `late_s`: how much later each tick is."""

    answers: bool = True
    answers_anew: bool = True
    num_heard: int = 0
    num_questions: int = 0
    num_questions_anew: int = 0
    now_s: float = 100.0
    late_s: Iterator[float] = field(default_factory=lambda: iter(()))
    held: list[asyncio.Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = PeerWatch(
            self._ask, self._ask_anew, lambda: self.num_heard, self._sleep, lambda: self.now_s
        )

    async def _sleep(self, delay_s: float) -> None:
        self.now_s += delay_s + next(self.late_s, 0.0)
        for _ in range(5):
            await asyncio.sleep(0)

    async def _ask(self) -> bool:
        self.num_questions += 1
        if not self.answers:
            self.held.append(asyncio.get_running_loop().create_future())
            await self.held[-1]
        return True

    async def _ask_anew(self) -> bool:
        self.num_questions_anew += 1
        return self.answers_anew

    async def run(self, duration_s: float) -> list[PeerState]:
        """What is known after each tick of so much time."""
        states = []
        until_s = self.now_s + duration_s
        while self.now_s < until_s:
            states.append(await self.watch.tick())
        return states


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    yield peer
    await peer.watch.close()


async def test_peer_is_not_asked_while_something_comes(peer: Peer) -> None:
    for _ in range(100):
        peer.num_heard += 1
        assert await peer.watch.tick() is PeerState.ANSWERS
    assert peer.num_questions == 0


async def test_peer_is_asked_once_a_second_when_nothing_comes(peer: Peer) -> None:
    assert set(await peer.run(30)) == {PeerState.ANSWERS}
    assert 15 <= peer.num_questions <= 30
    assert peer.num_questions_anew == 0


async def test_peer_is_silent_within_five_seconds_when_it_answers_nothing(peer: Peer) -> None:
    await peer.run(10)
    peer.answers = peer.answers_anew = False
    states = await peer.run(10)
    since_s = TICK_S * (1 + states.index(PeerState.SILENT))
    assert SILENT_AFTER_S - QUIET_S <= since_s <= 5
    assert PeerState.CUT not in states


async def test_peer_answers_when_it_was_busy_for_three_seconds(peer: Peer) -> None:
    peer.answers = peer.answers_anew = False
    assert set(await peer.run(3)) == {PeerState.ANSWERS}
    # Its answers are late, and count.
    for held in peer.held:
        held.set_result(None)
    peer.answers = True
    assert set(await peer.run(20)) == {PeerState.ANSWERS}


async def test_connection_is_cut_when_only_a_new_one_is_answered(peer: Peer) -> None:
    peer.answers = False
    states = await peer.run(10)
    assert set(states) == {PeerState.ANSWERS, PeerState.CUT}
    assert states.index(PeerState.CUT) * TICK_S <= 5


async def test_peer_answers_again_when_it_was_silent(peer: Peer) -> None:
    peer.answers = peer.answers_anew = False
    assert (await peer.run(10))[-1] is PeerState.SILENT
    peer.num_heard += 1
    assert await peer.watch.tick() is PeerState.ANSWERS


async def test_peer_answers_when_the_watch_itself_was_paused(peer: Peer) -> None:
    # Each time an answer is there, and not read yet.
    peer.late_s = iter([60.0, 0.0, 0.0] * 20)
    peer.answers_anew = False
    assert set(await peer.run(1000)) == {PeerState.ANSWERS}


async def test_questions_are_bounded_when_nobody_answers(peer: Peer) -> None:
    peer.answers = False
    await peer.run(1000)
    assert sum(not held.done() for held in peer.held) <= 10


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, True),
        (grpc.StatusCode.PERMISSION_DENIED, True),
        (grpc.StatusCode.UNAVAILABLE, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, False),
    ],
)
def test_refusal_is_an_answer_and_a_broken_connection_is_none(
    code: grpc.StatusCode, expected: bool
) -> None:
    assert is_answer(rpc_error(code, "")) is expected
