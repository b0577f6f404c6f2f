"""Tests pauses and log entries after refusals."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_service.audit import RequestRefused
from scheduler_service.callers import Caller, Scope
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.service import RefusalPauses, RequestLog
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError
from tests.support.security.credentials import ListedAudit

QUOTA = "QUOTA_EXCEEDED"


class Clock:
    """Nobody waits."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


async def test_pauses_double_and_begin_again_when_a_submit_was_taken() -> None:
    clock = Clock()
    pause = RefusalPauses(clock.sleep).of("a")
    for reason in (QUOTA, QUOTA, QUOTA, QUOTA, QUOTA, QUOTA, None, QUOTA):
        await pause.after(reason)
    assert clock.slept_s == [0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.01]


async def test_no_pause_is_made_for_other_refusals() -> None:
    clock = Clock()
    pauses = RefusalPauses(clock.sleep)
    await pauses.of("a").after("PROMPT_EMPTY")
    await pauses.of(None).after(QUOTA)
    assert clock.slept_s == []


async def test_pauses_go_on_when_a_tenant_has_another_session() -> None:
    clock = Clock()
    pauses = RefusalPauses(clock.sleep)
    sessions = [pauses.of("a") for _ in range(3)]
    for session in sessions:
        await session.after(QUOTA)
    await pauses.of("b").after(QUOTA)
    assert clock.slept_s == [0.01, 0.02, 0.04, 0.01]


async def test_pauses_begin_anew_when_all_sessions_ended() -> None:
    clock = Clock()
    pauses = RefusalPauses(clock.sleep)
    for _ in range(2):
        await pauses.of("a").after(QUOTA)
    assert clock.slept_s == [0.01, 0.01]


async def test_sessions_of_a_tenant_pause_one_after_the_other() -> None:
    asleep: list[asyncio.Event] = []

    async def sleep(_: float) -> None:
        asleep.append(asyncio.Event())
        await asleep[-1].wait()

    pauses = RefusalPauses(sleep)
    sessions = [pauses.of("a") for _ in range(2)] + [pauses.of("b")]
    pausing = [asyncio.create_task(session.after(QUOTA)) for session in sessions]
    await asyncio.sleep(0)
    # One of each tenant.
    assert len(asleep) == 2
    for event in asleep:
        event.set()
    await pausing[0]
    await asyncio.sleep(0)
    assert len(asleep) == 3
    asleep[2].set()
    await asyncio.gather(*pausing)


@pytest.mark.parametrize("tenant", ["", "t" * 129])
def test_names_of_a_refused_request_are_shortened_before_they_wait(tenant: str) -> None:
    audit = ListedAudit()
    log = RequestLog(Driver(ClusterConfig(), 1, lambda: None, audit=audit))
    caller = Caller("c" * 1000, tenant, frozenset({Scope.GENERATE}))
    message = api.GenerateRequest(request_id="r" * 4_000_000, tenant="m" * 4_000_000)

    with pytest.raises(DomainError), log.refusals(message, caller):
        raise DomainError("REQUEST_ID_INVALID", "too long")

    shown = ("t" if tenant else "m") * 128 + "..."
    assert audit.events == [
        RequestRefused("c" * 128 + "...", shown, "r" * 128 + "...", "REQUEST_ID_INVALID", "")
    ]
    whole = api.GenerateRequest(request_id="r" * 128)
    with pytest.raises(DomainError), log.refusals(whole, caller):
        raise DomainError("REQUEST_ID_INVALID", "why")
    assert isinstance(audit.events[1], RequestRefused)
    assert audit.events[1].request_id == "r" * 128
