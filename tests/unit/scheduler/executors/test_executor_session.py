"""Tests one executor over its link: results that become events, and when it is given up."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator

import numpy as np
import pytest

from scheduler_service.adapters import AdapterRegistry
from scheduler_service.executors import (
    MAX_REPEATED,
    AnswerWatch,
    ExecutorLost,
    ExecutorSession,
    ExecutorSilent,
    Life,
    SignsOfLife,
    StepAlarm,
    StepPatience,
    is_refused,
)
from scheduler_service.scheduler import events
from scheduler_service.scheduler.values import StepPlan, StepStatus
from scheduler_service.step_codec import EncodedBatch, ReceivedResult
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import CoreDriver
from tests.support.processes.addresses import reserve_address

ADDRESS = "executor:1"


class ScriptedLink:
    """Stands for an `ExecutorLink`: results are what the test says."""

    def __init__(self) -> None:
        limits = pb.ExecutorLimits(max_inflight_steps=3, max_message_bytes=2**20)
        self.info = pb.ExecutorInfo(address=ADDRESS, executor_epoch=1, limits=limits)
        self.sent: list[int] = []
        self._results: asyncio.Queue[pb.StepResult] = asyncio.Queue()

    def send(self, batch: EncodedBatch) -> None:
        """See Link."""
        self.sent.append(batch.step_id)

    def answer(self, step_id: int, *token_ids: int) -> None:
        """Makes a result come in."""
        self.answer_with(step_id, np.array(token_ids, "<i4").tobytes())

    def answer_with(self, step_id: int, tokens: bytes) -> None:
        self._results.put_nowait(
            pb.StepResult(step_id=step_id, status=pb.STEP_STATUS_OK, sampled_token_ids=tokens)
        )

    def tell_part(self, step_id: int, tokens: bytes) -> None:
        """Makes a part of a result come in."""
        self._results.put_nowait(
            pb.StepResult(step_id=step_id, status=pb.STEP_STATUS_PARTIAL, sampled_token_ids=tokens)
        )

    async def results(self) -> AsyncGenerator[pb.StepResult, None]:
        """See Link."""
        while True:
            yield await self._results.get()


class Conversation:
    """A session that runs, and the events that it reports."""

    def __init__(self, patience_s: float = 240.0) -> None:
        self.link = ScriptedLink()
        self.reported: list[events.StepCompleted] = []
        self.parts: list[events.StepProgressed] = []
        self.doubts: list[bool] = []
        self._core = CoreDriver()
        self._core.add(3, max_tokens=50)
        patience = StepPatience(patience_s, 2 * patience_s)
        self.alarm = StepAlarm(
            AnswerWatch(ADDRESS, patience, SignsOfLife()),
            time.monotonic_ns,
            block_size=4,
            ask_others=lambda: None,
            doubted=self.doubts.append,
        )
        self.session = ExecutorSession(
            self.link,  # type: ignore[arg-type]
            self._core.config,
            Life(1, patience),
            self.alarm,
            1,
            self._report,
            AdapterRegistry(),
        )
        self.running = asyncio.ensure_future(self.session.run())

    def _report(self, event: events.Event, _received: ReceivedResult | None) -> None:
        if isinstance(event, events.StepProgressed):
            self.parts.append(event)
            return
        assert isinstance(event, events.StepCompleted)
        self.reported.append(event)

    @property
    def step_ids(self) -> list[int]:
        """Steps that were reported as completed."""
        return [event.outcome.step_id for event in self.reported]

    def plan(self) -> StepPlan:
        """The next step of one row."""
        plan = self._core.plan()
        assert plan is not None
        return plan

    def send(self, max_message_bytes: int = 2**20) -> None:
        """Sends the next step."""
        self.link.info.limits.max_message_bytes = max_message_bytes
        self.session.send(self.plan())

    async def turns(self) -> None:
        """Lets everything happen that is under way."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def lost(self) -> ExecutorLost:
        """Why the session ended."""
        with pytest.raises(ExecutorLost) as caught:
            await self.running
        return caught.value

    async def close(self) -> None:
        """Ends the session as the scheduler does."""
        self.session.closed()
        await self.running


async def test_results_are_reported_in_order_with_their_messages() -> None:
    talk = Conversation()
    talk.send()
    talk.send()
    talk.link.answer(1, 7)
    talk.link.answer(2, 8)
    await talk.turns()
    assert talk.link.sent == talk.step_ids == [1, 2]
    assert [event.outcome.token_ids.tolist() for event in talk.reported] == [[7], [8]]
    assert all(event.was_sent for event in talk.reported)
    await talk.close()


async def test_result_is_not_reported_when_its_step_was_answered_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talk = Conversation()
    talk.send()
    talk.link.answer(1, 7)
    talk.link.answer(1, 7)
    await talk.turns()
    assert talk.step_ids == [1]
    assert "step_answered_again address=executor:1 step_id=1" in caplog.text
    talk.send()
    talk.link.answer(2, 8)
    await talk.turns()
    assert talk.step_ids == [1, 2]
    await talk.close()


async def test_executor_is_lost_when_it_repeats_a_result_for_ever() -> None:
    talk = Conversation()
    talk.send()
    for _ in range(MAX_REPEATED + 2):
        talk.link.answer(1, 7)
    assert "broke the step contract" in str(await talk.lost())
    assert talk.step_ids == [1]


async def test_parts_are_reported_until_their_result() -> None:
    talk = Conversation()
    talk.send()
    talk.link.tell_part(1, np.array([7], "<i4").tobytes())
    talk.link.tell_part(1, np.array([-1], "<i4").tobytes())
    talk.link.answer(1, 7)
    talk.link.tell_part(1, np.array([8], "<i4").tobytes())
    await talk.turns()
    assert [event.part.token_ids.tolist() for event in talk.parts] == [[7], []]
    assert [event.part.counts.tolist() for event in talk.parts] == [[1], [0]]
    assert talk.step_ids == [1]
    await talk.close()


async def test_executor_is_lost_when_a_part_is_undecodable() -> None:
    talk = Conversation()
    talk.send()
    talk.link.tell_part(1, b"odd")
    assert "broke the step contract" in str(await talk.lost())
    assert talk.parts == []


async def test_result_of_another_step_is_reported_without_rows() -> None:
    talk = Conversation()
    talk.send()
    talk.link.answer(9)
    await talk.turns()
    (event,) = talk.reported
    assert (event.outcome.step_id, len(event.outcome.token_ids)) == (9, 0)
    await talk.close()


async def test_executor_is_lost_when_a_result_is_undecodable() -> None:
    talk = Conversation()
    talk.send()
    talk.link.answer_with(1, b"odd")
    assert "broke the step contract" in str(await talk.lost())
    assert talk.reported == []


async def test_oversized_batch_is_answered_as_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talk = Conversation()
    talk.send(max_message_bytes=1)
    (event,) = talk.reported
    assert (event.outcome.step_id, event.outcome.status) == (1, StepStatus.REFUSED)
    assert not event.was_sent
    assert talk.link.sent == []
    assert talk.alarm.watch.is_idle
    assert "batch_exceeds_max_message_bytes step_id=1" in caplog.text
    await talk.close()


async def test_oversized_batch_is_answered_in_order() -> None:
    talk = Conversation()
    talk.send()
    talk.send(max_message_bytes=1)
    talk.send()
    assert talk.reported == []
    talk.link.answer(1, 7)
    await talk.turns()
    assert talk.step_ids == [1, 2]
    talk.link.answer(3, 9)
    await talk.turns()
    assert talk.step_ids == [1, 2, 3]
    assert [event.was_sent for event in talk.reported] == [True, False, True]
    await talk.close()


async def test_nothing_is_reported_of_a_removed_executor() -> None:
    talk = Conversation()
    talk.send()
    await talk.turns()
    talk.session.is_connected = True
    talk.link.answer(1, 7)
    talk.session.closed()
    await talk.running
    assert talk.reported == []
    assert not talk.session.is_connected


async def test_session_ends_when_it_is_cancelled() -> None:
    talk = Conversation()
    await talk.turns()
    talk.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talk.running


async def test_executor_is_given_up_when_its_oldest_step_is_not_answered() -> None:
    talk = Conversation(patience_s=0.01)
    talk.send()
    lost = await talk.lost()
    assert isinstance(lost, ExecutorSilent)
    assert "no result of the oldest step after" in str(lost)
    assert talk.reported == []
    talk.session.closed()


async def test_doubt_is_told_once_when_it_changes() -> None:
    talk = Conversation()
    for is_silent in (True, True, False, False):
        talk.alarm.silent(is_silent=is_silent)
    assert talk.doubts == [True, False]
    await talk.close()


def listener(family: socket.AddressFamily, host: str) -> socket.socket:
    """Raises OSError where the machine has no such addresses."""
    listening = socket.socket(family)
    try:
        listening.bind((host, 0))
    except OSError:
        listening.close()
        raise
    listening.listen()
    return listening


async def test_address_refuses_when_nobody_listens() -> None:
    assert await is_refused(reserve_address())


async def test_address_does_not_refuse_when_somebody_listens() -> None:
    with listener(socket.AF_INET, "127.0.0.1") as listening:
        assert not await is_refused(f"127.0.0.1:{listening.getsockname()[1]}")


async def test_name_does_not_refuse_when_one_address_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = reserve_address().rpartition(":")
    with listener(socket.AF_INET, "127.0.0.1") as listening:
        ports = [int(refusing[2]), listening.getsockname()[1]]

        async def two_addresses(*_: object, **__: object) -> list[object]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_addresses)
        assert not await is_refused("executor:1")
        ports.pop()
        assert await is_refused("executor:1")


async def test_ipv6_address_refuses_when_nobody_listens_any_more() -> None:
    try:
        listening = listener(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    target = f"[::1]:{listening.getsockname()[1]}"
    with listening:
        assert not await is_refused(target)
    assert await is_refused(target)


@pytest.mark.parametrize("error", [TimeoutError(), OSError(113, "no route"), socket.gaierror()])
async def test_address_does_not_refuse_when_it_cannot_be_reached(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
    assert not await is_refused("127.0.0.1:1")


@pytest.mark.parametrize("target", ["127.0.0.1", "127.0.0.1:", "host name:x"])
async def test_address_does_not_refuse_when_it_is_none(target: str) -> None:
    assert not await is_refused(target)
