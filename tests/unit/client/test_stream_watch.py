"""Streams over a silent connection, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import grpc.aio
import pytest

from splitserve_client import Elsewhere, StreamWatch, channels
from tests.simulation.virtual_loop import new_loop


class _Call:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class _Channel:
    """`answers`: whether the scheduler does, over this connection."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class _Connection:
    """The connection in use, and what becomes of those that are opened meanwhile."""

    def __init__(self, *, answers: bool, answers_anew: bool) -> None:
        self.channel = _Channel(answers=answers)
        self.num_replaced = 0
        self.streams = StreamWatch(
            cast(grpc.aio.Channel, self.channel),
            lambda: cast(grpc.aio.Channel, _Channel(answers=answers_anew)),
            self._replace,
        )

    def _replace(self) -> None:
        self.num_replaced += 1

    async def hold(self, num_streams: int, elsewhere: Elsewhere | None = None) -> list[_Call]:
        """Has so many streams open for a minute in which nothing comes."""
        calls = [_Call() for _ in range(num_streams)]
        async with AsyncExitStack() as stack:
            for call in calls:
                await stack.enter_async_context(self.streams.stream(call, elsewhere))
            await asyncio.sleep(60)
        return calls


async def _is_answering(channel: Any) -> bool:  # noqa: ANN401
    return bool(channel.answers)


async def _is_better() -> bool:
    return True


Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(channels, "is_answering", _is_answering)
    return lambda story: new_loop().run_until_complete(story())


def test_connection_is_replaced_when_only_new_ones_answer(
    run: Run,
) -> None:
    async def story() -> None:
        connection = _Connection(answers=False, answers_anew=True)
        calls = await connection.hold(3)
        assert all(call.is_cancelled for call in calls)
        assert connection.num_replaced == 1
        assert "new connections" in connection.streams.problem

    run(story)


def test_streams_stay_when_very_many_are_open(run: Run) -> None:
    async def story() -> None:
        connection = _Connection(answers=False, answers_anew=True)
        calls = await connection.hold(100)
        assert not any(call.is_cancelled for call in calls)

    run(story)


@pytest.mark.parametrize("elsewhere", [None, _is_better])
def test_streams_of_a_silent_scheduler_end_when_another_serves(
    run: Run, elsewhere: Elsewhere | None
) -> None:
    async def story() -> None:
        connection = _Connection(answers=False, answers_anew=False)
        calls = await connection.hold(3, elsewhere)
        assert {call.is_cancelled for call in calls} == {elsewhere is not None}
        assert connection.num_replaced == 0

    run(story)


def test_streams_stay_when_nothing_comes_and_the_scheduler_answers(run: Run) -> None:
    async def story() -> None:
        connection = _Connection(answers=True, answers_anew=True)
        calls = await connection.hold(3, _is_better)
        assert not any(call.is_cancelled for call in calls)

    run(story)


def test_nothing_is_left_when_the_last_stream_has_ended(run: Run) -> None:
    async def story() -> None:
        before = asyncio.all_tasks()
        await _Connection(answers=False, answers_anew=False).hold(2)
        assert asyncio.all_tasks() == before

    run(story)
