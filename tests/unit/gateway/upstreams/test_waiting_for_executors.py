"""Requests that wait while executors move from one scheduler to another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from splitserve_client import (
    ClientConfig,
    Draining,
    RetryPolicy,
    SchedulingParams,
)
from splitserve_common import StaticDiscovery
from splitserve_contract import DomainError
from splitserve_gateway.callers import Caller
from splitserve_gateway.http import ApiError
from splitserve_gateway.upstreams import Upstream, UpstreamRequest
from splitserve_gateway.upstreams import fleet as fleet_module
from tests.support.fakes.fake_scheduler import FakeScheduler
from tests.support.fakes.running_schedulers import (
    EXPECTED,
    PARAMS,
    PROMPT,
    Schedulers,
    refuse,
    schedulers,
)

pytestmark = pytest.mark.usefixtures("asked_often")


def refuse_model() -> None:
    raise DomainError("MODEL_NOT_READY", "no executor has come yet")


@asynccontextmanager
async def second_without_executor(give_up_after_s: float = 240.0) -> AsyncIterator[Schedulers]:
    """Two schedulers; the second has no executor, and the fleet knows that."""
    config = ClientConfig(retry=RetryPolicy(give_up_after_s=give_up_after_s))
    async with schedulers(2, config) as running:
        running.fakes[1].before_model = refuse_model
        first, second = running.fleet._upstreams
        await running.until(lambda: running.addresses_taking() == [first.address])
        assert second.will_serve
        yield running


def have_executors(fake: FakeScheduler) -> None:
    fake.before_model = lambda: None


async def stop_first(running: Schedulers) -> None:
    """The first is being stopped: it takes no requests, and says so of its health."""
    running.fakes[0].before_request = refuse("DRAINING")
    await running.servers[0].set_serving(("",), False)


async def looked(running: Schedulers, num_looks: int = 6) -> None:
    """Both schedulers were asked meanwhile what they serve."""
    for _ in range(num_looks):
        await running.fleet._news.wait()


async def test_request_waits_for_executors_of_stopping_scheduler() -> None:
    async with second_without_executor() as running:
        await stop_first(running)
        generating = [asyncio.create_task(running.generate()) for _ in range(3)]
        await running.until(lambda: running.num_requests == [3, 0])
        looks = [asyncio.create_task(running.fleet._news.wait()) for _ in range(2)]
        await asyncio.gather(*looks)
        assert not any(each.done() for each in generating)
        # They go there when the first has ended.
        await running.servers[0].server.stop(None)
        have_executors(running.fakes[1])
        assert await asyncio.gather(*generating) == [EXPECTED] * 3
        assert running.num_requests == [3, 3]


async def test_request_waits_until_successor_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_read = asyncio.Event()

    async def read_late(_: Upstream, *, takes_audio: bool) -> tuple[None, None]:
        assert not takes_audio
        await is_read.wait()
        return None, None

    async with second_without_executor() as running:
        await stop_first(running)
        generating = asyncio.create_task(running.generate())
        await running.until(lambda: running.num_requests == [1, 0])
        monkeypatch.setattr(Upstream, "_read_tokenizer", read_late)
        have_executors(running.fakes[1])
        await running.until(lambda: running.fleet._upstreams[1].is_reading)
        # What is news of the first meanwhile, ends no wait.
        for _ in range(3):
            await running.fleet._news.wait()
        assert not generating.done()
        is_read.set()
        assert await generating == EXPECTED


async def test_request_is_refused_when_the_executors_do_not_come() -> None:
    async with second_without_executor(give_up_after_s=0.1) as running:
        await stop_first(running)
        with pytest.raises(Draining):
            await running.generate()
    async with second_without_executor() as running:
        await stop_first(running)
        upstream, served = running.fleet.choose(None)
        params = SchedulingParams(deadline_s=0.1)
        request = UpstreamRequest(upstream, PROMPT, PARAMS, params, served.model.digest)
        with pytest.raises(Draining):
            await anext(request.events())


async def test_request_is_refused_when_successor_serves_another_model() -> None:
    async with second_without_executor() as running:
        await stop_first(running)
        generating = asyncio.create_task(running.generate())
        await running.until(lambda: running.num_requests == [1, 0])
        running.fakes[1].model_digest = "another"
        have_executors(running.fakes[1])
        with pytest.raises(Draining):
            await generating


async def test_new_request_waits_for_executors_of_lost_scheduler() -> None:
    async with second_without_executor() as running:
        await running.servers[0].server.stop(None)
        await running.until(lambda: not running.fleet.reachable())
        waiting = asyncio.create_task(running.fleet.wait_read(None))
        looks = [asyncio.create_task(running.fleet._news.wait()) for _ in range(2)]
        await asyncio.gather(*looks)
        assert not waiting.done()
        have_executors(running.fakes[1])
        await waiting
        assert await running.generate() == EXPECTED
        assert running.num_requests == [0, 1]


async def test_request_of_an_adapter_waits_for_executors_of_lost_scheduler() -> None:
    async with second_without_executor() as running:
        await running.servers[0].server.stop(None)
        await running.until(lambda: not running.fleet.reachable())
        waiting = asyncio.create_task(running.fleet.wait_read("formal"))
        await looked(running)
        assert not waiting.done()
        have_executors(running.fakes[1])
        await waiting


async def test_request_resumes_when_its_scheduler_restarted() -> None:
    async with second_without_executor() as running:
        await stop_first(running)
        generating = asyncio.create_task(running.generate())
        await running.until(lambda: running.num_requests == [1, 0])
        await looked(running)
        assert not generating.done()
        # It comes back, and it is there that its executors go.
        running.fakes[0].before_request = lambda _: None
        await running.servers[0].set_serving(("",), True)
        assert await generating == EXPECTED
        assert running.num_requests == [2, 0]


async def test_new_request_waits_for_executors_of_removed_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_LOOK_S", 0.01)
    async with second_without_executor() as running:
        first, second = running.fleet._upstreams
        # A name server leaves out who is being stopped, which has its executors until its end.
        held = running.fakes[0].hold = asyncio.Event()
        generating = asyncio.create_task(running.generate())
        await running.until(lambda: running.num_requests == [1, 0])
        before = Caller("key", upstreams=frozenset([first]))
        assert before.is_served
        running.fleet._schedulers = StaticDiscovery([second.address])
        await running.until(lambda: running.fleet._upstreams == [second])
        assert not before.is_served
        waiting = asyncio.create_task(running.fleet.wait_read(None))
        await looked(running)
        assert not waiting.done()
        held.set()
        assert await generating == EXPECTED
        await running.until(lambda: not running.fleet._retired)
        await looked(running)
        assert not waiting.done()
        have_executors(running.fakes[1])
        await waiting
        assert running.fleet.reachable() == [second]


async def test_new_request_waits_for_its_lost_model() -> None:
    async with schedulers(3, digests=["aa", "aa", "bb"]) as running:
        running.fakes[2].name = "other"
        running.fakes[1].before_model = refuse_model
        first, second, third = running.fleet._upstreams
        await running.until(lambda: running.addresses_taking() == [first.address, third.address])
        await running.until(lambda: third.served is not None and third.served.model.name == "other")
        await running.servers[0].server.stop(None)
        await running.until(lambda: running.fleet.reachable() == [third])
        waiting = asyncio.create_task(running.fleet.wait_read("fake"))
        # What nobody served is not waited for.
        await running.fleet.wait_read("unheard")
        await looked(running)
        assert not waiting.done()
        have_executors(running.fakes[1])
        await waiting
        assert running.fleet.choose("fake")[0] is second


async def test_new_request_waits_only_for_allowed_schedulers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_READING_S", 3600.0)
    async with second_without_executor() as running:
        first, second = running.fleet._upstreams
        await running.servers[0].server.stop(None)
        await running.until(lambda: not running.fleet.reachable())
        for allowed in ([], [first]):
            await running.fleet.wait_read(None, allowed)
        waiting = asyncio.create_task(running.fleet.wait_read(None, [first, second]))
        await looked(running)
        assert not waiting.done()
        have_executors(running.fakes[1])
        await waiting


async def test_new_request_is_refused_when_nobody_was_lost() -> None:
    async with schedulers(1) as running:
        running.fakes[0].before_model = refuse_model
        upstream = running.fleet._upstreams[0]
        await running.until(lambda: upstream.will_serve)
        running.fleet._lost_s.clear()
        await running.fleet.wait_read(None)
        with pytest.raises(ApiError, match="no scheduler"):
            running.fleet.choose(None)
