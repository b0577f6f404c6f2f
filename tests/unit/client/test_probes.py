"""Who is asked, and for how many answers is waited at a time."""

from __future__ import annotations

import asyncio

import pytest

from splitserve_client import schedulers
from splitserve_client.errors import ServerUnreachable
from splitserve_client.schedulers import MAX_AT_ONCE, Answers, ask


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers, "_PACE_S", 3600.0)


class _Schedulers:
    """They answer when the test says so."""

    def __init__(self, count: int) -> None:
        self.answers = {f"10.0.0.{n}:1": asyncio.Future[bool]() for n in range(count)}
        self.asked: list[str] = []
        self.num_waiting = 0
        self._has_asked = asyncio.Event()

    async def is_serving(self, address: str) -> bool:
        self.asked.append(address)
        self._has_asked.set()
        self.num_waiting += 1
        try:
            return await asyncio.shield(self.answers[address])
        finally:
            self.num_waiting -= 1

    async def until_asked(self, count: int) -> None:
        while len(self.asked) < count:
            self._has_asked.clear()
            await self._has_asked.wait()


async def test_few_are_waited_for_at_a_time_when_none_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedulers, "_PACE_S", 0.0)
    many, answers = _Schedulers(64), Answers()
    asking = asyncio.create_task(ask(many.answers, many.is_serving, answers))
    await many.until_asked(MAX_AT_ONCE)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(many.asked) == many.num_waiting == MAX_AT_ONCE
    # One that does not answer in time makes room for the next.
    many.answers[many.asked[0]].set_exception(ServerUnreachable("silent"))
    await many.until_asked(MAX_AT_ONCE + 1)
    many.answers[many.asked[-1]].set_result(True)
    await asking
    assert answers.serving == many.asked[-1]
    assert len(many.asked) == MAX_AT_ONCE + 1
    assert many.num_waiting == 0, "nobody waits for what nobody needs"


async def test_one_is_asked_when_it_answers() -> None:
    many, answers = _Schedulers(8), Answers()
    next(iter(many.answers.values())).set_result(True)
    await ask(many.answers, many.is_serving, answers)
    assert many.asked == [answers.serving]


async def test_next_is_asked_at_once_when_one_refuses_or_does_not_serve() -> None:
    many, answers = _Schedulers(4), Answers()
    refusing, first_idle, idle, serving = many.answers.values()
    refusing.set_exception(ServerUnreachable("refused"))
    first_idle.set_result(False)
    idle.set_result(False)
    serving.set_result(True)
    await ask(many.answers, many.is_serving, answers)
    assert many.asked == list(many.answers)
    assert (answers.idle, answers.serving) == (many.asked[1], many.asked[3])
    assert str(answers.problem) == "refused"
