"""What a request is charged is what it took, however it ended, and then it counts no more.

The clock stands still, so what is refused says by its delay exactly how much was used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from scheduler_service.callers.caller import TenantLimits
from scheduler_service.config import ClusterConfig
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_rpc.errors import RpcFailure, failure_of
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.local_call import LocalCall
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process
from tests.support.security.bearer import bearer
from tests.support.security.key_ring import KeyRing

PROMPT = [3, 4, 5]
ONE_AT_A_TIME = TenantLimits(max_concurrent_requests=1, tokens_per_minute=1e9)
# Used is then what is waited for, in minutes.
ONE_TOKEN = TenantLimits(tokens_per_minute=1.0)
SMALL = ClusterConfig(reconnect_timeout_s=0.1, max_unread_bytes=16 * 1024)


@dataclass
class Running:
    """A scheduler and a tenant `a`, which may have one request at a time."""

    scheduler: SchedulerInProcess
    stub: scheduler_pb2_grpc.SchedulerServiceStub
    watch: StepWatch
    keys: KeyRing
    key: str

    def generate(self, request: api.GenerateRequest | None = None) -> Any:  # noqa: ANN401
        return self.stub.Generate(request or a_request(), metadata=self.metadata)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return bearer(self.key)

    async def begin(self) -> Any:  # noqa: ANN401
        """Its stream, when it has a token."""
        self.watch.hold(after=4)
        call = self.generate()
        assert (await call.read()).tokens.token_ids
        return call

    async def refusal(self, request: api.GenerateRequest | None = None) -> RpcFailure:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(request).read()
        return failure_of(caught.value)

    async def used_tokens(self) -> int:
        """What the tenant was charged so far."""
        self.keys.limits_of["a"] = ONE_TOKEN
        refusal = await self.refusal()
        self.keys.limits_of["a"] = ONE_AT_A_TIME
        assert refusal.reason == "QUOTA_EXCEEDED"
        assert refusal.retry_delay_s is not None
        return round(refusal.retry_delay_s / 60)

    async def wait_ended(self) -> None:
        async def ask() -> tuple[bool, int]:
            num_unfinished = self.scheduler.cluster.num_unfinished
            return num_unfinished == 0, num_unfinished

        await poll(ask)


def a_request(max_tokens: int = 60, **fields: Any) -> api.GenerateRequest:  # noqa: ANN401
    params = api.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return api.GenerateRequest(
        prompt_token_ids=PROMPT, sampling_params=params, request_id="r", **fields
    )


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    keys, watch = KeyRing(), StepWatch()
    keys.limits_of["a"] = ONE_AT_A_TIME
    executor = FakeExecutor(fault=watch)
    async with (
        scheduler_in_process(
            executor, config=SMALL, callers=keys, now_ns=lambda: 10**18
        ) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        yield Running(scheduler, stub, watch, keys, keys.add("a"))
        watch.release()


async def finish_of(call: Any) -> api.Finish:  # noqa: ANN401
    while not (response := await call.read()).HasField("finish"):
        pass
    finish: api.Finish = response.finish
    return finish


async def test_request_is_charged_its_prompt_and_output_when_it_finishes(running: Running) -> None:
    call = await running.begin()
    assert await running.used_tokens() == len(PROMPT)
    running.watch.release()
    assert (await finish_of(call)).usage.num_output_tokens == 60
    assert await running.used_tokens() == len(PROMPT) + 60


async def test_request_is_charged_what_it_has_when_it_is_aborted(running: Running) -> None:
    call = await running.begin()
    await running.stub.Abort(api.AbortRequest(request_id="r"), metadata=running.metadata)
    num_outputs = (await finish_of(call)).usage.num_output_tokens
    assert 0 < num_outputs < 60
    assert await running.used_tokens() == len(PROMPT) + num_outputs


async def test_second_request_is_refused_until_the_first_ends(running: Running) -> None:
    call = await running.begin()
    refusal = await running.refusal()
    assert refusal.reason == "QUOTA_EXCEEDED"
    assert refusal.retry_delay_s == 1
    assert "tenant 'a' has used up max_concurrent_requests 1" in refusal.message
    assert running.scheduler.cluster.num_unfinished == 1
    running.watch.release()
    await finish_of(call)
    assert (await finish_of(running.generate())).reason == api.FINISH_REASON_LENGTH


async def client_gone(running: Running) -> None:
    (await running.begin()).cancel()


async def session_gone(running: Running) -> None:
    session = running.stub.Session(metadata=running.metadata)
    submit = api.SessionSubmit(handle=1, request=a_request())
    running.watch.hold(after=4)
    await session.write(api.SessionRequest(submit=submit))
    # A slow reader gets both tokens in one message.
    assert set((await session.read()).handles) == {1}
    session.cancel()


async def stream_not_read(running: Running) -> None:
    """Called without gRPC, which would take some MiB off the stream by itself."""

    request = a_request(250)
    request.sampling_params.num_logprobs = 20
    stream = running.scheduler.servicer.Generate(request, LocalCall(running.key))
    await anext(stream)
    await running.wait_ended()
    await stream.aclose()


@pytest.mark.parametrize("end", [client_gone, session_gone, stream_not_read])
async def test_request_is_charged_what_it_has_when_its_client_is_gone(
    running: Running, end: Callable[[Running], Awaitable[None]]
) -> None:
    await end(running)
    await running.wait_ended()
    num_used = await running.used_tokens()
    assert len(PROMPT) < num_used < len(PROMPT) + 250
    running.watch.release()
    await finish_of(running.generate())  # there is room for it
    assert await running.used_tokens() == num_used + len(PROMPT) + 60


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (a_request(adapter="none here"), "FEATURE_UNSUPPORTED"),
        (a_request(max_tokens=0), "SAMPLING_PARAMS_INVALID"),
        (a_request(priority=101), "SCHEDULING_PARAMS_INVALID"),
        (a_request(model_digest="another"), "MODEL_CHANGED"),
    ],
)
async def test_refused_request_costs_nothing(
    running: Running, request_: api.GenerateRequest, reason: str
) -> None:
    for _ in range(3):
        assert (await running.refusal(request_)).reason == reason
    call = await running.begin()
    assert await running.used_tokens() == len(PROMPT)
    # Nor does one whose id is in use.
    running.keys.limits_of["a"] = TenantLimits(tokens_per_minute=1e9)
    assert (await running.refusal()).reason == "REQUEST_ID_IN_USE"
    assert await running.used_tokens() == len(PROMPT)
    call.cancel()


async def test_session_lives_on_when_a_quota_refuses(running: Running) -> None:
    session = running.stub.Session(metadata=running.metadata)
    for handle in (1, 2):
        submit = api.SessionSubmit(handle=handle, request=a_request(max_tokens=2))
        submit.request.request_id = f"r{handle}"
        running.watch.hold()
        await session.write(api.SessionRequest(submit=submit))
    (event,) = (await session.read()).events
    assert (event.handle, event.rejected.reason) == (2, "QUOTA_EXCEEDED")
    assert event.rejected.retry_delay.ToSeconds() == 1
    running.watch.release()
    assert (await session.read()).handles == [1]


async def test_broken_stream_is_not_lost_to_a_quota(running: Running) -> None:
    call = await running.begin()
    resumed = a_request(resume_token_ids=[7, 8])
    resumed.request_id = "again"
    running.watch.release()
    assert (await finish_of(running.generate(resumed))).usage.num_output_tokens == 60
    await finish_of(call)
    assert await running.used_tokens() == 2 * (len(PROMPT) + 60)
