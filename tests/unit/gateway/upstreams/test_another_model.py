"""Requests while a scheduler's new model is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from splitserve_client import ModelChanged, SamplingParams, SchedulingParams, UnreadBudget
from splitserve_common import StaticDiscovery
from splitserve_gateway.http import ApiError
from splitserve_gateway.upstreams import Fleet, UpstreamRequest
from splitserve_gateway.upstreams import fleet as fleet_module
from splitserve_gateway.upstreams import upstream as upstream_module
from tests.support.fakes.fake_scheduler import FakeScheduler, start
from tests.support.processes.gateway import until

BEFORE, NOW = "00ff", "beef"


@dataclass
class SlowToRead(FakeScheduler):
    """Its tokenizer is read no further than the test says."""

    may_be_read: asyncio.Event = field(default_factory=asyncio.Event)
    is_read: asyncio.Event = field(default_factory=asyncio.Event)

    async def GetTokenizer(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        self.is_read.set()
        await self.may_be_read.wait()
        async for response in super().GetTokenizer(request, context):  # type: ignore[no-untyped-call]
            yield response


@pytest.fixture(autouse=True)
def _asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "_POLL_S", 3600.0)


@asynccontextmanager
async def changed() -> AsyncIterator[tuple[Fleet, SlowToRead]]:
    """The gateway has been told by a request that another model is served, which it reads."""
    async with AsyncExitStack() as stack:
        fake = SlowToRead(model_digest=BEFORE)
        server = await start(fake)
        stack.push_async_callback(server.server.stop, None)
        address = f"127.0.0.1:{server.port}"
        fleet = await stack.enter_async_context(Fleet(StaticDiscovery([address]), UnreadBudget()))

        fake.may_be_read.set()
        await until(lambda: fleet.is_ready)
        fake.may_be_read.clear()
        fake.is_read.clear()
        fake.model_digest = NOW
        upstream, served = fleet.choose(None)
        params = SamplingParams(seed=7, max_tokens=6)
        request = UpstreamRequest(upstream, [3], params, SchedulingParams(), served.model.digest)
        with pytest.raises(ModelChanged):
            await anext(request.events())
        # Its client tells its caller after that, so whoever asks then must not be refused again.
        assert not fleet.is_ready
        await fake.is_read.wait()
        yield fleet, fake


@pytest.mark.parametrize("model", [None, "fake"])
async def test_request_waits_when_another_model_is_read(model: str | None) -> None:
    async with changed() as (fleet, fake):
        waiting = asyncio.ensure_future(fleet.wait_read(model))
        await asyncio.wait([waiting], timeout=0)
        assert not waiting.done()
        assert fleet.models() == []
        fake.may_be_read.set()
        await waiting
        _, served = fleet.choose(model)
        assert served.model.digest == NOW
        assert fleet.is_ready


async def test_request_waits_no_longer_when_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_READING_S", 0.0)
    async with changed() as (fleet, fake):
        await fleet.wait_read(None)
        with pytest.raises(ApiError) as refused:
            fleet.choose(None)
        assert refused.value.status == 503
        fake.may_be_read.set()


async def test_model_is_kept_when_doubt_is_of_its_predecessor() -> None:
    async with changed() as (fleet, fake):
        fake.may_be_read.set()
        await fleet.wait_read(None)
        upstream, _ = fleet.choose(None)
        upstream.doubt(BEFORE)
        assert fleet.is_ready
        assert not upstream.is_reading


async def test_nobody_waits_when_no_scheduler_can_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_READING_S", 3600.0)
    async with Fleet(StaticDiscovery(["127.0.0.1:1"]), UnreadBudget()) as fleet:
        await fleet.wait_read(None)
        assert fleet.models() == []
