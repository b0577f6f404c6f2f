"""LoadAdapter calls to one executor: what is repeated, and what requests are told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler_service.executors import adapter_loader, executor_link
from scheduler_service.scheduler import effects, events
from splitserve.executor.v1 import executor_pb2 as pb

LATER = executor_link.AdapterNotLoaded("the call was cut", is_final=False)
NEVER = executor_link.AdapterNotLoaded("the rank is 99", is_final=True)


class Executor:
    """An executor that answers LoadAdapter from a list."""

    def __init__(self, *answers: Exception | None) -> None:
        self.info = SimpleNamespace(executor_epoch=7)
        self.requests: list[pb.LoadAdapterRequest] = []
        self._answers = list(answers)

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> None:
        self.requests.append(request)
        if (answer := self._answers.pop(0)) is not None:
            raise answer


class Sources:
    """Has the files of every adapter for some questions; then no request has it."""

    def __init__(self, num_answers: int) -> None:
        self._num_left = num_answers

    def source(self, reference: str) -> tuple[Path, str, int] | None:
        self._num_left -= 1
        return (Path(f"/{reference}"), "ab" * 32, 3) if self._num_left >= 0 else None


async def loaded(executor: Executor, sources: Sources) -> events.AdapterLoaded:
    """Returns the report of one load."""
    reports: asyncio.Queue[events.AdapterLoaded] = asyncio.Queue()
    loader = adapter_loader.AdapterLoader(cast(Any, executor), 5, sources, reports.put_nowait)
    loader.load(effects.LoadAdapter("host:1", "a@1", ("b@2",)))
    try:
        return await reports.get()
    finally:
        loader.close()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_loader, "RETRY_PAUSE_S", 0.0)


async def test_call_is_repeated_when_it_may_succeed_later() -> None:
    executor = Executor(LATER, LATER, None)
    assert await loaded(executor, Sources(3)) == events.AdapterLoaded("host:1", "a@1", "")
    assert len(executor.requests) == 3
    assert executor.requests[0].adapter.path == "/a@1"
    assert executor.requests[0].kept_adapters == ["b@2"]


async def test_call_is_not_repeated_when_the_executor_cannot_load() -> None:
    executor = Executor(LATER, NEVER)
    assert (await loaded(executor, Sources(3))).why_not == "the rank is 99"


async def test_call_is_not_repeated_when_no_request_has_the_adapter() -> None:
    executor = Executor(LATER, LATER)
    assert "no request has it" in (await loaded(executor, Sources(2))).why_not
    assert len(executor.requests) == 2


async def test_end_is_told_with_its_reason_to_all_who_wait() -> None:
    loader = adapter_loader.AdapterLoader(
        cast(Any, Executor(NEVER)), 5, Sources(1), lambda _event: None
    )
    loader.load(effects.LoadAdapter("host:1", "a@1", ()))
    ends = await asyncio.gather(loader.ended("a@1"), loader.ended("a@1"))
    assert list(ends) == ["the rank is 99"] * 2
    loader.close()


async def test_end_is_told_when_the_executor_is_lost() -> None:
    loader = adapter_loader.AdapterLoader(cast(Any, Executor()), 5, Sources(0), lambda _event: None)
    end = loader.ended("a@1")
    loader.close()
    assert await end == ""
