"""Adapters: they are named in requests of every kind, listed, loaded and unloaded."""

from __future__ import annotations

import pytest

from splitserve_client import (
    Adapter,
    AdapterExists,
    AdapterUnknown,
    AsyncClient,
    Client,
    ClientConfig,
    InvalidRequest,
    SamplingParams,
    SchedulingParams,
)
from tests.support.fakes.fake_scheduler import FakeScheduler
from tests.support.fakes.running_schedulers import FakeServer

PARAMS = SamplingParams(seed=1, max_tokens=2)
SCHEDULING = SchedulingParams(adapter="formal")


async def test_every_request_names_its_adapter_when_it_has_one(
    address: str, fake: FakeScheduler
) -> None:
    async with AsyncClient(address) as client:
        await client.complete([3], PARAMS, scheduling=SCHEDULING)
        async with client.session() as session:
            assert [event async for event in session.submit([3], PARAMS, scheduling=SCHEDULING)]
        assert [request.adapter for request in fake.requests] == ["formal"] * 2


def test_texts_name_their_adapter_when_they_have_one() -> None:
    server = FakeServer()
    try:
        with Client(server.address) as client:
            client.complete_text("t3", PARAMS, scheduling=SCHEDULING)
            client.chat([{"role": "user", "content": "t3"}], PARAMS, scheduling=SCHEDULING)
            results = client.map(["t3", "t4"], PARAMS, scheduling=SCHEDULING)
            assert all(result.error is None for result in results)
    finally:
        server.close()
    assert [request.adapter for request in server.fake.requests] == ["formal"] * 4


async def test_unknown_adapter_is_refused_in_calls_and_in_sessions(
    address: str, fake: FakeScheduler
) -> None:
    fake.adapter_refusal = "ADAPTER_UNKNOWN"
    async with AsyncClient(address) as client, client.session() as session:
        with pytest.raises(AdapterUnknown, match="'formal'"):
            await client.complete([3], PARAMS, scheduling=SCHEDULING)
        with pytest.raises(AdapterUnknown, match="'formal'"):
            await anext(aiter(session.submit([3], PARAMS, scheduling=SCHEDULING)))


async def test_adapters_are_listed_once_they_are_loaded(address: str, fake: FakeScheduler) -> None:
    formal = Adapter("formal", "/formal", b"formal".hex(), "base")
    async with AsyncClient(address, ClientConfig(cluster_token="secret")) as client:
        assert await client.list_adapters() == ()
        assert await client.load_adapter("formal", "/formal") == formal
        with pytest.raises(AdapterExists):
            await client.load_adapter("formal", "/other")
        await client.load_adapter("formal", "/other", replace=True)
        with pytest.raises(InvalidRequest) as caught:
            await client.load_adapter("short", "folder")
        assert caught.value.reason == "ADAPTER_INVALID"
        assert [adapter.path for adapter in await client.list_adapters()] == ["/other"]
        await client.unload_adapter("formal")
        with pytest.raises(AdapterUnknown):
            await client.unload_adapter("formal")
