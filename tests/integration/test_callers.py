"""Tests a scheduler that knows its callers: admission, ownership of requests, limits, quotas.

The clock stands still, so the delay of a quota's refusal says exactly how much was used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from scheduler_service.callers import Scope, TenantLimits
from scheduler_service.config import ClusterConfig
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_rpc import RpcFailure, failure_of
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process
from tests.support.security.credentials import KeyRing, LocalCall, bearer

NO_SUCH_MODEL = "somebody-else's-*"
PROMPT = [3, 4, 5]
ONE_AT_A_TIME = TenantLimits(max_concurrent_requests=1, tokens_per_minute=1e9)
# The tokens used are then the minutes to wait.
ONE_TOKEN = TenantLimits(tokens_per_minute=1.0)
SMALL = ClusterConfig(reconnect_timeout_s=0.1, max_unread_bytes=16 * 1024)


@dataclass(frozen=True, slots=True)
class Running:
    """A scheduler whose executor holds its steps until `watch` lets them begin."""

    keys: KeyRing
    scheduler: SchedulerInProcess
    stub: scheduler_pb2_grpc.SchedulerServiceStub
    watch: StepWatch

    def generate(self, credential: str, **fields: Any) -> Any:  # noqa: ANN401
        return self.stub.Generate(request(**fields), metadata=bearer(credential))

    async def begin(self, credential: str, **fields: Any) -> Any:  # noqa: ANN401
        """Returns a stream that has its first token and waits for more."""
        self.watch.hold()
        num_before = self.scheduler.cluster.num_unfinished
        call = self.generate(credential, **fields)
        await self._let_begin(num_before)
        assert (await call.read()).tokens.token_ids
        return call

    async def refusal(self, credential: str, **fields: Any) -> RpcFailure:  # noqa: ANN401
        return await refused(self.generate(credential, **fields).read())

    async def abort(self, credential: str, request_id: str) -> None:
        message = api.AbortRequest(request_id=request_id)
        await self.stub.Abort(message, metadata=bearer(credential))

    def session(self, credential: str) -> Any:  # noqa: ANN401
        return self.stub.Session(metadata=bearer(credential))

    async def begin_in(self, session: Any, message: api.SessionRequest) -> None:  # noqa: ANN401
        """Submits in a session, and waits for the first token."""
        self.watch.hold()
        num_before = self.scheduler.cluster.num_unfinished
        await session.write(message)
        await self._let_begin(num_before)
        # A slow reader gets several tokens in one message.
        assert set((await session.read()).handles) == {message.submit.handle}

    async def _let_begin(self, num_before: int) -> None:
        """Allows a few steps once one more request is known; others would use them up before."""
        await self.until_unfinished(lambda num_unfinished: num_unfinished > num_before)
        self.watch.hold(after=4)

    async def until_unfinished(self, holds: Callable[[int], bool]) -> None:
        """Waits until `holds` of the number of unfinished requests."""

        async def ask() -> tuple[bool, int]:
            num_unfinished = self.scheduler.cluster.num_unfinished
            return holds(num_unfinished), num_unfinished

        await poll(ask)

    async def used_tokens(self, credential: str) -> int:
        """Returns what tenant a, with this credential, was charged so far."""
        limits = self.keys.limits_of["a"]
        self.keys.limits_of["a"] = ONE_TOKEN
        refusal = await self.refusal(credential)
        self.keys.limits_of["a"] = limits
        assert refusal.reason == "QUOTA_EXCEEDED"
        assert refusal.retry_delay_s is not None
        return round(refusal.retry_delay_s / 60)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    keys, watch = KeyRing(), StepWatch()
    executor = FakeExecutor(fault=watch)
    async with (
        scheduler_in_process(
            executor, config=SMALL, callers=keys, now_ns=lambda: 10**18
        ) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        watch.hold()
        yield Running(keys, scheduler, scheduler_pb2_grpc.SchedulerServiceStub(channel), watch)
        watch.release()


def request(params: dict[str, Any] | None = None, **fields: Any) -> api.GenerateRequest:  # noqa: ANN401
    wanted = {"max_tokens": 60, "ignore_eos": True} if params is None else params
    return api.GenerateRequest(
        prompt_token_ids=PROMPT, sampling_params=api.SamplingParams(**wanted), **fields
    )


def submission(handle: int, credential: str = "", **fields: Any) -> api.SessionRequest:  # noqa: ANN401
    submit = api.SessionSubmit(handle=handle, request=request(**fields), credential=credential)
    return api.SessionRequest(submit=submit)


async def end_of(call: Any) -> api.GenerateResponse:  # noqa: ANN401
    """Returns the last message of a stream."""
    last = api.GenerateResponse()
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    return last


async def refused(answer: Awaitable[object]) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return failure_of(caught.value)


async def rejection(session: Any, message: api.SessionRequest) -> api.RequestError:  # noqa: ANN401
    """Returns why a submit was refused; the session lives on."""
    await session.write(message)
    while not (events := (await session.read()).events):
        pass  # tokens of others
    (event,) = events
    assert event.handle == message.submit.handle
    rejected: api.RequestError = event.rejected
    return rejected


# -- admission ---------------------------------------------------------------------------------


async def test_revoked_key_is_refused_and_its_streams_go_on(running: Running) -> None:
    key = running.keys.add("a")
    call = await running.begin(key)
    session = running.session(key)
    await running.begin_in(session, submission(1))
    running.keys.revoke(key)
    assert (await running.refusal(key)).reason == "CALLER_UNKNOWN"
    assert (await rejection(session, submission(2))).reason == "CALLER_UNKNOWN"
    running.watch.release()
    assert (await end_of(call)).finish.reason == api.FINISH_REASON_LENGTH
    assert set((await session.read()).handles) == {1}


async def test_identify_says_whose_a_credential_is(running: Running) -> None:
    keys = running.keys
    keys.limits_of["b"] = TenantLimits(models=(NO_SUCH_MODEL,))
    gateway = keys.add("", Scope.GATEWAY)
    for tenant, may_use_model in (("a", True), ("b", False)):
        asked = api.IdentifyRequest(credential=keys.add(tenant, Scope.TENANTS, Scope.GENERATE))
        answer = await running.stub.Identify(asked, metadata=bearer(gateway))
        assert answer.knows_callers
        assert (answer.tenant, answer.may_use_model) == (tenant, may_use_model)
        assert answer.caller == f"key{'ab'.index(tenant) + 1}"
        assert list(answer.scopes) == ["generate", "tenants"]
    for credential in ("", "nobody's", "x" * 8193):
        asked = api.IdentifyRequest(credential=credential)
        call = running.stub.Identify(asked, metadata=bearer(gateway))
        assert (await refused(call)).reason == "CALLER_UNKNOWN"


async def test_identify_lets_everybody_in_when_callers_are_not_known() -> None:
    async with (
        scheduler_in_process(FakeExecutor()) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        answer = await stub.Identify(api.IdentifyRequest(credential="whatever"))
    assert (answer.knows_callers, answer.may_use_model) == (False, True)
    assert set(answer.scopes) == {scope.value for scope in Scope}


async def test_gateway_submits_for_tenants_and_for_nobody_else(running: Running) -> None:
    keys = running.keys
    alice, gateway = keys.add("a"), keys.add("", Scope.GATEWAY)
    others = [gateway, keys.add("", Scope.GATEWAY), keys.add("", Scope.OPERATOR)]
    session = running.session(gateway)
    for credential, reason in (
        *((each, "CALLER_NOT_ALLOWED") for each in ("", *others)),
        *((each, "CALLER_UNKNOWN") for each in ("nobody's", "x" * 8193)),
    ):
        assert (await rejection(session, submission(1, credential))).reason == reason
    await running.begin_in(session, submission(1, alice))
    keys.revoke(alice)
    assert (await rejection(session, submission(2, alice))).reason == "CALLER_UNKNOWN"
    assert (await running.refusal(gateway)).reason == "CALLER_NOT_ALLOWED"


async def test_client_may_not_bring_the_credential_of_another(running: Running) -> None:
    alice, bob = running.keys.add("a"), running.keys.add("b")
    session = running.session(alice)
    assert (await rejection(session, submission(1, bob))).reason == "CALLER_NOT_ALLOWED"
    await running.begin_in(session, submission(1))


# -- ownership of requests ---------------------------------------------------------------------


async def test_id_of_another_tenant_is_unknown(running: Running) -> None:
    alice, colleague, bob = (running.keys.add(tenant) for tenant in "aab")
    call = await running.begin(alice, request_id="x")
    for request_id in ("1:a:x", "a:x", ":x", "x"):
        taken = await refused(running.abort(bob, request_id))
        never = await refused(running.abort(bob, "y" * len(request_id)))
        assert taken.reason == never.reason == "REQUEST_UNKNOWN"
        assert taken.message.replace(request_id, "y" * len(request_id)) == never.message
    assert running.scheduler.cluster.num_unfinished == 1
    await running.abort(colleague, "x")
    assert (await end_of(call)).finish.reason == api.FINISH_REASON_ABORTED


async def test_same_id_runs_side_by_side_when_tenants_differ(running: Running) -> None:
    alice, bob = running.keys.add("a"), running.keys.add("b")
    calls = [await running.begin(key, request_id="x") for key in (alice, bob)]
    again = await running.refusal(alice, request_id="x")
    assert (again.reason, again.message) == ("REQUEST_ID_IN_USE", "request_id 'x' is unfinished")
    await running.abort(bob, "x")
    answer = await end_of(calls[1])
    assert (answer.request_id, answer.finish.reason) == ("x", api.FINISH_REASON_ABORTED)
    running.watch.release()
    answer = await end_of(calls[0])
    assert (answer.request_id, answer.finish.reason) == ("x", api.FINISH_REASON_LENGTH)


async def test_tenant_is_the_callers_when_it_may_not_name_another(running: Running) -> None:
    keys = running.keys
    keys.limits_of["a"] = TenantLimits(max_output_tokens=5)
    alice, front = keys.add("a"), keys.add("f", Scope.GENERATE, Scope.TENANTS)
    assert "'a'" in (await running.refusal(alice, tenant="b")).message
    assert "'a'" in (await running.refusal(front, tenant="a")).message
    long_name = await running.refusal(front, tenant="a" * 100_000)
    assert long_name.reason == "SCHEDULING_PARAMS_INVALID"
    assert "tenant has 100000 characters" in long_name.message
    await running.begin(front, tenant="b")
    await running.begin(front)


# -- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "fields", "reason"),
    [
        (TenantLimits(max_prompt_tokens=2), {}, "PROMPT_TOO_LONG"),
        (TenantLimits(max_output_tokens=59), {}, "SAMPLING_PARAMS_INVALID"),
        (TenantLimits(max_priority=5), {"priority": 6}, "CALLER_NOT_ALLOWED"),
        (TenantLimits(models=(NO_SUCH_MODEL,)), {}, "CALLER_NOT_ALLOWED"),
    ],
)
async def test_request_is_refused_when_its_tenant_may_not(
    running: Running, limits: TenantLimits, fields: dict[str, Any], reason: str
) -> None:
    alice, bob = running.keys.add("a"), running.keys.add("b")
    running.keys.limits_of["a"] = limits
    assert (await running.refusal(alice, **fields)).reason == reason
    await running.begin(bob, **fields)


async def test_request_ends_at_its_tenants_limit_when_it_names_none(running: Running) -> None:
    alice = running.keys.add("a")
    running.keys.limits_of["a"] = TenantLimits(max_output_tokens=5)
    running.watch.release()
    finish = (await end_of(running.generate(alice, params={"ignore_eos": True}))).finish
    assert finish.usage.num_output_tokens == 5
    assert finish.reason == api.FINISH_REASON_LENGTH


async def test_model_is_hidden_from_tenants_that_may_not_use_it(running: Running) -> None:
    alice, bob = running.keys.add("a"), running.keys.add("b")
    gateway = running.keys.add("a", Scope.GATEWAY)
    running.keys.limits_of["a"] = TenantLimits(models=(NO_SUCH_MODEL,))
    model = await running.stub.GetModel(api.GetModelRequest(), metadata=bearer(bob))
    assert model == await running.stub.GetModel(api.GetModelRequest(), metadata=bearer(gateway))
    call = running.stub.GetModel(api.GetModelRequest(), metadata=bearer(alice))
    assert (await refused(call)).reason == "CALLER_NOT_ALLOWED"
    files = running.stub.GetTokenizer(api.GetTokenizerRequest(), metadata=bearer(alice))
    assert (await refused(files.read())).reason == "CALLER_NOT_ALLOWED"


# -- quotas ------------------------------------------------------------------------------------


@pytest.fixture
def key(running: Running) -> str:
    """The credential of tenant a, which may have one request at a time."""
    running.keys.limits_of["a"] = ONE_AT_A_TIME
    return running.keys.add("a")


async def test_request_is_charged_its_prompt_and_output_when_it_finishes(
    running: Running, key: str
) -> None:
    call = await running.begin(key)
    assert await running.used_tokens(key) == len(PROMPT)
    running.watch.release()
    assert (await end_of(call)).finish.usage.num_output_tokens == 60
    assert await running.used_tokens(key) == len(PROMPT) + 60


async def test_request_is_charged_what_it_has_when_it_is_aborted(
    running: Running, key: str
) -> None:
    call = await running.begin(key, request_id="r")
    await running.abort(key, "r")
    num_outputs = (await end_of(call)).finish.usage.num_output_tokens
    assert 0 < num_outputs < 60
    assert await running.used_tokens(key) == len(PROMPT) + num_outputs


async def test_second_request_is_refused_until_the_first_ends(running: Running, key: str) -> None:
    call = await running.begin(key)
    refusal = await running.refusal(key)
    assert (refusal.reason, refusal.retry_delay_s) == ("QUOTA_EXCEEDED", 1)
    assert "tenant 'a' has used up max_concurrent_requests 1" in refusal.message
    assert running.scheduler.cluster.num_unfinished == 1
    running.watch.release()
    await end_of(call)
    assert (await end_of(running.generate(key))).finish.reason == api.FINISH_REASON_LENGTH


async def client_gone(running: Running, key: str) -> None:
    (await running.begin(key)).cancel()


async def session_gone(running: Running, key: str) -> None:
    session = running.session(key)
    await running.begin_in(session, submission(1))
    session.cancel()


async def stream_not_read(running: Running, key: str) -> None:
    """Calls without gRPC, which would take some MiB off the stream by itself."""
    running.watch.release()
    asked = request({"max_tokens": 250, "ignore_eos": True, "num_logprobs": 20})
    stream = running.scheduler.servicer.Generate(asked, LocalCall(key))
    await anext(stream)
    await running.until_unfinished(lambda num_unfinished: num_unfinished == 0)
    await stream.aclose()


@pytest.mark.parametrize("end", [client_gone, session_gone, stream_not_read])
async def test_request_is_charged_what_it_has_when_its_client_is_gone(
    running: Running, key: str, end: Callable[[Running, str], Awaitable[None]]
) -> None:
    await end(running, key)
    await running.until_unfinished(lambda num_unfinished: num_unfinished == 0)
    num_used = await running.used_tokens(key)
    assert len(PROMPT) < num_used < len(PROMPT) + 250
    running.watch.release()
    await end_of(running.generate(key))  # its place is free
    assert await running.used_tokens(key) == num_used + len(PROMPT) + 60


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"adapter": "none here"}, "FEATURE_UNSUPPORTED"),
        ({"params": {"max_tokens": 0}}, "SAMPLING_PARAMS_INVALID"),
        ({"priority": 101}, "SCHEDULING_PARAMS_INVALID"),
        ({"model_digest": "another"}, "MODEL_CHANGED"),
    ],
)
async def test_refused_request_costs_nothing(
    running: Running, key: str, fields: dict[str, Any], reason: str
) -> None:
    for _ in range(3):
        assert (await running.refusal(key, **fields)).reason == reason
    call = await running.begin(key, request_id="r")
    assert await running.used_tokens(key) == len(PROMPT)
    # Nor does one whose id is in use.
    running.keys.limits_of["a"] = TenantLimits(tokens_per_minute=1e9)
    assert (await running.refusal(key, request_id="r")).reason == "REQUEST_ID_IN_USE"
    assert await running.used_tokens(key) == len(PROMPT)
    call.cancel()


async def test_session_lives_on_when_a_quota_refuses(running: Running, key: str) -> None:
    session = running.session(key)
    running.watch.hold()
    short = {"max_tokens": 2, "ignore_eos": True}
    await session.write(submission(1, params=short))
    rejected = await rejection(session, submission(2, params=short))
    assert (rejected.reason, rejected.retry_delay.ToSeconds()) == ("QUOTA_EXCEEDED", 1)
    running.watch.release()
    assert (await session.read()).handles == [1]


async def test_resumed_request_is_admitted_beside_the_broken_one(
    running: Running, key: str
) -> None:
    call = await running.begin(key)
    running.watch.release()
    resumed = await end_of(running.generate(key, resume_token_ids=[7, 8]))
    assert resumed.finish.usage.num_output_tokens == 60
    await end_of(call)
    assert await running.used_tokens(key) == 2 * (len(PROMPT) + 60)
