"""How often schedulers are asked who somebody is, and what that may cost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from splitserve_gateway.callers.caller import Caller
from splitserve_gateway.callers.identification import AskAgain, KnownCallers, Memory
from splitserve_gateway.http.errors import ApiError, no_scheduler
from splitserve_gateway.upstreams.upstream import Upstream

MEMORY = Memory(
    known_s=5.0, unknown_s=1.0, max_known=2, max_unknown=2, max_strangers=2, max_waiting=0
)


class Reachable:
    """As much of a scheduler as is looked at here."""

    served: object | None = object()
    is_named = True


class Asked:
    """What schedulers would say, and whom they were asked about; `now_s` is the time."""

    def __init__(self, memory: Memory = MEMORY) -> None:
        self.callers: dict[str, Caller | None] = {}
        self.credentials: list[str] = []
        self.now_s = 0.0
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_down = False
        self.delays_s: list[float] = []
        self.num_answers = 1000
        self.known = KnownCallers(self.ask, lambda: self.now_s, memory, self.sleep)

    async def sleep(self, delay_s: float) -> None:
        """Schedulers answer two more after each pause."""
        self.delays_s.append(delay_s)
        await asyncio.sleep(0)
        self.num_answers = 2

    async def ask(self, credential: str) -> Caller | None:
        self.credentials.append(credential)
        await self.answers.wait()
        if not self.num_answers:
            raise AskAgain(0.5)
        self.num_answers -= 1
        if self.is_down:
            raise no_scheduler()
        return self.callers.get(credential)

    async def status(self, credential: str, origin: str = "") -> int:
        try:
            await self.known.identify(credential, origin)
        except ApiError as error:
            return error.status
        return 200

    def begin(self, credential: str, origin: str = "") -> asyncio.Task[int]:
        return asyncio.create_task(self.status(credential, origin))


async def begun(*tasks: asyncio.Task[int]) -> None:
    """Lets all run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


@pytest.fixture
async def asked() -> Asked:
    made = Asked()
    made.callers = {name: Caller(name) for name in ("a", "b", "c")}
    return made


async def test_caller_is_asked_about_again_when_the_answer_is_old(asked: Asked) -> None:
    for now_s in (0.0, 4.9, 5.0, 9.9):
        asked.now_s = now_s
        assert await asked.status("a") == 200
    assert asked.credentials == ["a", "a"]


async def test_revoked_caller_is_refused_when_the_answer_is_old(asked: Asked) -> None:
    assert await asked.status("a") == 200
    asked.callers["a"] = None
    asked.now_s = 5.0
    assert await asked.status("a") == 401
    # And let in again soon after it was given back.
    asked.callers["a"] = Caller("a")
    asked.now_s = 5.9
    assert await asked.status("a") == 401
    asked.now_s = 6.0
    assert await asked.status("a") == 200
    assert asked.credentials == ["a"] * 3


async def test_caller_is_asked_about_again_when_no_scheduler_that_knows_it_is_left(
    asked: Asked,
) -> None:
    lost = Reachable()
    asked.callers["a"] = Caller("a", upstreams=frozenset([cast("Upstream", lost)]))
    assert await asked.status("a") == 200
    lost.served = None
    joined = asked.callers["a"] = Caller("a", upstreams=frozenset())
    assert await asked.known.identify("a") is joined
    assert asked.credentials == ["a", "a"]


async def test_one_question_serves_all_who_ask_the_same(asked: Asked) -> None:
    asked.answers.clear()
    tasks = [asked.begin("a") for _ in range(10)]
    await begun(*tasks)
    # Whoever asked first leaves.
    tasks[0].cancel()
    asked.answers.set()
    assert await asyncio.gather(*tasks[1:]) == [200] * 9
    assert asked.credentials == ["a"]


async def test_strangers_are_refused_when_many_are_asked_about_and_others_are_not(
    asked: Asked,
) -> None:
    assert await asked.status("a") == 200
    asked.now_s = 5.0
    asked.answers.clear()
    strangers = [asked.begin(name) for name in ("x", "y")]
    await begun(*strangers)
    assert await asked.status("b") == 503
    known = asked.begin("a")
    again = asked.begin("x")
    await begun(*strangers, known, again)
    asked.answers.set()
    assert await asyncio.gather(*strangers, again, known) == [401, 401, 401, 200]
    assert await asked.status("b") == 200


async def test_nobody_is_let_in_and_nothing_remembered_when_no_scheduler_can_say(
    asked: Asked,
) -> None:
    assert await asked.status("a") == 200
    asked.is_down = True
    assert await asked.status("a") == 200
    asked.now_s = 5.0
    assert [await asked.status(name) for name in ("a", "b", "x")] == [503] * 3
    asked.is_down = False
    assert [await asked.status(name) for name in ("a", "b", "x")] == [200, 200, 401]


async def test_few_are_remembered_and_strangers_push_out_nobody_who_is_known(asked: Asked) -> None:
    for name in ("a", "b", "x", "y", "z"):
        await asked.status(name)
    asked.credentials.clear()
    for name in ("a", "b", "y", "z", "x"):
        await asked.status(name)
    # Of three strangers, the one that came first was forgotten.
    assert asked.credentials == ["x"]
    asked.credentials.clear()
    for name in ("c", "b", "a"):
        await asked.status(name)
    assert asked.credentials == ["c", "a"]


async def test_flood_of_one_origin_delays_a_stranger_of_another_by_one_question() -> None:
    asked = Asked(replace(MEMORY, max_waiting=40, patience_s=60.0))
    asked.callers = {"genuine": Caller("genuine")}
    asked.answers.clear()
    flood = [asked.begin(f"guess {number}", "flood") for number in range(100)]
    for _ in range(5):
        await asyncio.sleep(0)
    refused = [task for task in flood if task.done()]
    # Two are asked about; those that wait leave places in the queue.
    assert len(refused) > 100 - 2 - 40
    assert {task.result() for task in refused} == {503}
    genuine = asked.begin("genuine", "elsewhere")
    await begun(genuine)
    asked.answers.set()
    assert await genuine == 200
    assert asked.credentials.index("genuine") <= 3
    assert {await task for task in flood if task not in refused} == {401}


async def test_stranger_waits_no_longer_than_it_has_patience() -> None:
    asked = Asked(replace(MEMORY, max_strangers=1, max_waiting=40, patience_s=0.01))
    asked.callers = {"genuine": Caller("genuine")}
    asked.answers.clear()
    first = asked.begin("guess", "flood")
    await begun(first)
    assert await asked.status("genuine", "elsewhere") == 503
    assert asked.credentials == ["guess"]
    asked.answers.set()
    assert await first == 401
    assert await asked.status("genuine", "elsewhere") == 200


async def test_stranger_whose_turn_it_is_is_asked_about_again_when_schedulers_have_enough() -> None:
    asked = Asked(replace(MEMORY, max_waiting=40, patience_s=60.0))
    asked.callers = {"genuine": Caller("genuine")}
    asked.num_answers = 0
    flood = [asked.begin(f"guess {number}", "flood") for number in range(20)]
    assert await asked.status("genuine", "elsewhere") == 200
    assert asked.delays_s[0] == 0.5
    assert {await task for task in flood} == {401}


async def test_stranger_is_refused_when_schedulers_never_have_room() -> None:
    asked = Asked()

    async def ask(credential: str) -> Caller | None:
        asked.credentials.append(credential)
        raise AskAgain(0.25)

    asked.known = KnownCallers(ask, lambda: 0.0, MEMORY, asked.sleep)
    assert await asked.status("a") == 503
    assert asked.credentials == ["a"] * MEMORY.most_asks
    assert asked.delays_s == [0.25] * (MEMORY.most_asks - 1)
