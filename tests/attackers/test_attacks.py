"""Attacks on a secured stack: each is refused by name, and other callers are served as before."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import grpc
import grpc.aio
import httpx2
import pytest

from splitserve.executor.v1 import executor_pb2, executor_pb2_grpc
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import (
    AsyncClient,
    Finish,
    InvalidRequest,
    RequestUnknown,
    SamplingParams,
    SchedulingParams,
    ServerUnreachable,
    SplitserveError,
)
from splitserve_rpc import failure_of
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.cluster import refusal_of_batch
from tests.support.security.secured_stack import SecuredStack

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
PROMPT = list(range(100, 164))


async def test_abort_by_id_finds_nothing_of_other_tenants(stack: SecuredStack) -> None:
    async with (
        AsyncClient(stack.clients, stack.client("tenant a")) as owner,
        AsyncClient(stack.clients, stack.client("tenant b")) as attacker,
        aclosing(owner.generate(PROMPT, LONG, request_id="mine")) as events,
    ):
        await anext(events)
        said = []
        for request_id in ("mine", "none"):
            with pytest.raises(RequestUnknown) as refused:
                await attacker.abort(request_id)
            said.append(refused.value.message.replace(request_id, "ID"))
        # Not even that it is there.
        assert said[0] == said[1]
        # The same id is free for the other, and is another request.
        assert len((await attacker.complete(PROMPT, SHORT, request_id="mine")).token_ids) == 2
        *_, last = [event async for event in events]
    assert isinstance(last, Finish)
    assert (last.reason.value, last.usage.num_output_tokens) == ("length", 400)


async def test_stolen_executor_takes_no_living_address(stack: SecuredStack) -> None:
    assert await register(stack, "an executor", stack.cluster, stack.executor) == (
        "EXECUTOR_MISMATCH"
    )
    assert await is_served(stack)


@pytest.mark.parametrize("address", ["169.254.169.254:80", "10.1.2.3:443"])
async def test_register_makes_the_scheduler_dial_nothing_else(
    stack: SecuredStack, address: str
) -> None:
    said = await register(stack, "an executor", stack.cluster, address)
    assert said == "EXECUTOR_INFO_INVALID"


async def register(stack: SecuredStack, caller: str, address: str, advertised: str) -> str:
    """The reason why `caller` may not register an executor at `advertised`."""
    async with stack.channel("a scheduler", stack.executor) as channel:
        request = executor_pb2.GetInfoRequest()
        answer = await executor_pb2_grpc.ExecutorServiceStub(channel).GetInfo(
            request, timeout=PATIENCE_S
        )
    # As the true one says it, but for its address and its life.
    info = answer.executor
    info.address, info.executor_epoch = advertised, 2**62
    async with stack.channel(caller, address) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        metadata = stack.metadata(caller)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Register(
                registry_pb2.RegisterRequest(executor=info), metadata=metadata, timeout=PATIENCE_S
            )
    return failure_of(refused.value).reason or refused.value.code().name


@pytest.mark.parametrize("caller", ["anonymous", "tenant a", "an executor", "an operator"])
async def test_epoch_from_the_future_comes_from_the_scheduler_alone(
    stack: SecuredStack, caller: str
) -> None:
    batch = executor_pb2.ScheduleBatch(scheduler_epoch=2**62, step_id=1)
    async with stack.channel(caller, stack.executor) as channel:
        said = await refusal_of_batch(channel, batch)
    has_certificate = caller.startswith("an ")
    assert said == ("CALLER_NOT_ALLOWED" if has_certificate else "UNAVAILABLE")
    assert await is_served(stack)


async def test_cached_tokens_tell_nothing_of_other_tenants(stack: SecuredStack) -> None:
    prompt = list(range(200, 264))
    async with (
        AsyncClient(stack.clients, stack.client("tenant a")) as first,
        AsyncClient(stack.clients, stack.client("tenant b")) as second,
    ):
        await first.complete(prompt, SHORT)
        assert (await first.complete(prompt, SHORT)).usage.num_cached_tokens > 0
        # Whatever tenant the attacker says it is.
        for tenant in ("", "a", "b"):
            scheduling = SchedulingParams(tenant=tenant, cache_salt=tenant)
            probe = await second.complete(prompt, SHORT, scheduling=scheduling)
            assert probe.usage.num_cached_tokens == 0


async def test_prompt_of_60_mb_is_refused_before_it_is_decoded(stack: SecuredStack) -> None:
    async with AsyncClient(stack.clients, stack.client("tenant a")) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.complete([1] * 16_000_000, SHORT)
        assert refused.value.reason in {"MESSAGE_TOO_LARGE", ""}
    request = api.GenerateRequest(prompt_token_ids=[1] * 1_000_000).SerializeToString()
    async with stack.channel("anonymous", stack.clients) as channel:
        method = "/splitserve.scheduler.v1.SchedulerService/Generate"
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            async for _ in channel.unary_stream(method)(request, timeout=PATIENCE_S):
                pass
    assert failure_of(unknown.value).reason == "CALLER_UNKNOWN"
    async with stack.browser() as browser:
        body = b'{"prompt": "' + b"x" * 60_000_000 + b'"}'
        # Who goes on sending for too long after the answer is cut off, and may not see it.
        with suppress(httpx2.NetworkError):
            answer = await browser.post(
                "/v1/completions", content=body, headers=stack.headers("tenant a")
            )
            assert answer.status_code == 413
    assert await is_served(stack)


async def test_a_hundred_handshakes_at_a_time_end_no_process(stack: SecuredStack) -> None:
    async def handshake(address: str) -> None:
        async with AsyncClient(address, stack.client("tenant a")) as client:
            try:
                await client.get_model()
            except (ServerUnreachable, SplitserveError):
                assert address != stack.clients

    addresses = [stack.clients, stack.cluster, stack.executor] * 40
    await asyncio.gather(*(handshake(address) for address in addresses))
    assert stack.processes.are_alive()
    assert await is_served(stack)


async def is_served(stack: SecuredStack) -> bool:
    """Whether everybody is served as before."""
    async with AsyncClient(stack.clients, stack.client("tenant b")) as client:
        return len((await client.complete(PROMPT, SHORT)).token_ids) == 2
