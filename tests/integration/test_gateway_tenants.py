"""Tenants over HTTP, before a real scheduler with API keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from scheduler_service.callers import Scope, TenantLimits
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.server import Server
from tests.contract.stranger.process import poll
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.gateway import serving, text_executor, url_of
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import scheduler_in_process
from tests.support.security.credentials import KeyRing

MESSAGE: Any = {"role": "user", "content": "one two"}
COMPLETION: dict[str, Any] = {"prompt": "one two", "max_tokens": 6, "seed": 1}


@dataclass(frozen=True, slots=True)
class Running:
    """What runs."""

    keys: KeyRing
    watch: StepWatch
    own_file: Path
    server: Server
    model: str

    @property
    def request(self) -> dict[str, Any]:
        return {**COMPLETION, "model": self.model}

    def client(self, api_key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{url_of(self.server)}/v1", api_key=api_key, max_retries=0
        )

    async def complete(self, api_key: str, **fields: object) -> openai.types.Completion:
        async with self.client(api_key) as client:
            answer: openai.types.Completion = await client.completions.create(
                **self.request, extra_body=fields
            )
            return answer


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    keys, watch = KeyRing(), StepWatch()
    own = tmp_path / "own.txt"
    own.write_text(keys.add("the gateway", Scope.GATEWAY))
    executor = text_executor(tmp_path, fault=watch)
    async with scheduler_in_process(executor, callers=keys) as scheduler:
        config = GatewayConfig(schedulers=scheduler.address, gateway_key_file=own)
        async with (
            serving(config) as server,
            httpx2.AsyncClient(base_url=url_of(server), trust_env=False) as http,
        ):

            async def is_ready() -> tuple[bool, object]:
                answer = await http.get("/health/ready")
                return answer.status_code == 200, answer.text

            await poll(is_ready, PATIENCE_S)
            model = server.app.state.gateway.fleet.models()[0].name
            yield Running(keys, watch, own, server, model)


async def test_callers_are_answered_alike_and_ids_are_their_own(running: Running) -> None:
    alice, bob = running.keys.add("a"), running.keys.add("b")
    running.watch.hold(after=2)
    async with running.client(alice) as first, running.client(bob) as second:
        streams = [
            await client.completions.create(
                **running.request, stream=True, extra_body={"request_id": "r"}
            )
            for client in (first, second)
        ]
        running.watch.release()
        texts = ["".join([event.choices[0].text async for event in s]) for s in streams]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 0


async def test_revoked_caller_keeps_what_runs_and_begins_nothing_else(running: Running) -> None:
    alice = running.keys.add("a")
    whole = (await running.complete(alice)).choices[0].text
    running.watch.hold(after=3)
    async with running.client(alice) as client:
        stream = await client.completions.create(**running.request, stream=True)
        pieces = [(await anext(stream)).choices[0].text]
        running.keys.revoke(alice)
        # The gateway still remembers who that is; the scheduler knows better.
        with pytest.raises(openai.AuthenticationError):
            await running.complete(alice)
        running.watch.release()
        pieces += [event.choices[0].text async for event in stream]
    assert "".join(pieces) == whole


async def test_quota_of_a_tenant_is_no_others(running: Running) -> None:
    alice, also_alice, bob = (running.keys.add(tenant) for tenant in ("a", "a", "b"))
    running.keys.limits_of["a"] = TenantLimits(requests_per_minute=1)
    await running.complete(alice)
    with pytest.raises(openai.RateLimitError) as refused:
        await running.complete(also_alice)
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    await running.complete(bob)


async def test_key_may_come_from_the_client_of_anthropic(running: Running) -> None:
    alice = running.keys.add("a")
    asked: Any = {"model": running.model, "max_tokens": 3, "messages": [MESSAGE]}
    url = url_of(running.server)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=alice, max_retries=0) as client:
        running.keys.limits_of["a"] = TenantLimits(requests_per_minute=1)
        message = await client.messages.create(**asked)
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(**asked)
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.with_options(api_key="sk-ss-none-none").messages.create(**asked)
    assert message.usage.output_tokens == 3
    assert refused.value.error_code == "rate_limit_exceeded"
    assert unknown.value.type == "authentication_error"
    tokens = anthropic.AsyncAnthropic(base_url=url, auth_token=alice, max_retries=0)
    async with tokens as client:
        assert (await client.messages.count_tokens(model=running.model, messages=[MESSAGE])) == (
            anthropic.types.MessageTokensCount(input_tokens=message.usage.input_tokens)
        )


async def test_caller_gets_no_further_than_its_tenant_may(running: Running) -> None:
    alice = running.keys.add("a")
    running.keys.limits_of["a"] = TenantLimits(min_priority=5, models=("not-this-*",))
    with pytest.raises(openai.PermissionDeniedError):
        await running.complete(alice)
    running.keys.limits_of["a"] = TenantLimits(min_priority=5)
    bob = running.keys.add("a")
    with pytest.raises(openai.PermissionDeniedError, match="priority"):
        await running.complete(bob, priority=1)
    assert (await running.complete(bob, priority=6)).choices[0].text


async def test_gateway_goes_on_when_its_key_is_replaced(
    running: Running,
) -> None:
    alice = running.keys.add("a")
    whole = (await running.complete(alice)).choices[0].text
    running.watch.hold(after=3)
    async with running.client(alice) as client:
        stream = await client.completions.create(**running.request, stream=True)
        pieces = [(await anext(stream)).choices[0].text]
        first = running.own_file.read_text()
        running.own_file.write_text(running.keys.add("the gateway", Scope.GATEWAY))
        running.keys.revoke(first)
        running.watch.release()

        async def is_answered() -> tuple[bool, object]:
            try:
                return (await running.complete(alice)).choices[0].text == whole, ""
            except openai.APIStatusError as error:
                return False, error

        await poll(is_answered, PATIENCE_S)
        # What was begun with the first goes on.
        pieces += [event.choices[0].text async for event in stream]
    assert "".join(pieces) == whole
