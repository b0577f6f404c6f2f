"""A scheduler that knows its callers: whose requests are whose, and who may ask for what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_service.callers.caller import Scope, TenantLimits
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_rpc.errors import RpcFailure, failure_of
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process
from tests.support.security.bearer import bearer
from tests.support.security.key_ring import KeyRing

SERVICE = "/splitserve.scheduler.v1.SchedulerService"
NO_SUCH_MODEL = "somebody-else's-*"


@dataclass(frozen=True, slots=True)
class Running:
    """A scheduler whose executor goes no further than the first steps until `watch` says so."""

    keys: KeyRing
    scheduler: SchedulerInProcess
    stub: scheduler_pb2_grpc.SchedulerServiceStub
    channel: grpc.aio.Channel
    watch: StepWatch

    def generate(self, credential: str, **fields: Any) -> Any:  # noqa: ANN401
        return self.stub.Generate(request(**fields), metadata=bearer(credential))

    async def begin(self, credential: str, **fields: Any) -> Any:  # noqa: ANN401
        """A stream that has its first token, and waits for others."""
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
        """It has its first token."""
        self.watch.hold()
        num_before = self.scheduler.cluster.num_unfinished
        await session.write(message)
        await self._let_begin(num_before)
        assert (await session.read()).handles == [message.submit.handle]

    async def _let_begin(self, num_before: int) -> None:
        """A few steps, when one more request is there: others would use them up before."""

        async def ask() -> tuple[bool, int]:
            num_unfinished = self.scheduler.cluster.num_unfinished
            return num_unfinished > num_before, num_unfinished

        await poll(ask)
        self.watch.hold(after=4)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    keys, watch = KeyRing(), StepWatch()
    async with (
        scheduler_in_process(FakeExecutor(fault=watch), callers=keys) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        watch.hold()
        yield Running(keys, scheduler, stub, channel, watch)
        watch.release()


def request(params: dict[str, Any] | None = None, **fields: Any) -> api.GenerateRequest:  # noqa: ANN401
    sampling_params = api.SamplingParams(
        **({"max_tokens": 60, "ignore_eos": True} if params is None else params)
    )
    return api.GenerateRequest(
        prompt_token_ids=[3, 4, 5], sampling_params=sampling_params, **fields
    )


def submission(handle: int, credential: str = "", **fields: Any) -> api.SessionRequest:  # noqa: ANN401
    submit = api.SessionSubmit(handle=handle, request=request(**fields), credential=credential)
    return api.SessionRequest(submit=submit)


async def end_of(call: Any) -> api.GenerateResponse:  # noqa: ANN401
    """The last message of a stream."""
    last = api.GenerateResponse()
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    return last


async def refused(answer: Any) -> RpcFailure:  # noqa: ANN401
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return failure_of(caught.value)


async def rejection(session: Any, message: api.SessionRequest) -> str:  # noqa: ANN401
    """Why a submit was refused; the session lives on."""
    await session.write(message)
    while not (events := (await session.read()).events):
        pass  # tokens of others
    (event,) = events
    assert event.handle == message.submit.handle
    reason: str = event.rejected.reason
    return reason


# -- who gets in -------------------------------------------------------------------------------


@pytest.mark.parametrize("credential", ["", "somebody's", "the secret of key7"])
async def test_stranger_is_answered_by_health_alone(running: Running, credential: str) -> None:
    methods = scheduler_pb2_grpc.SchedulerServiceStub.__init__.__code__.co_names
    for name in ("Generate", "Session", "Abort", "GetModel", "GetTokenizer", "Identify"):
        assert name in methods
        call = running.channel.stream_unary(f"{SERVICE}/{name}")(metadata=bearer(credential))
        # Nothing was sent: a refusal waits for no message.
        assert (await refused(call)).reason == "CALLER_UNKNOWN"
    health = health_pb2_grpc.HealthStub(running.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_key_is_refused_when_it_was_revoked(running: Running) -> None:
    key = running.keys.add("a")
    call = await running.begin(key)
    session = running.session(key)
    await running.begin_in(session, submission(1))
    running.keys.revoke(key)
    assert (await running.refusal(key)).reason == "CALLER_UNKNOWN"
    assert await rejection(session, submission(2)) == "CALLER_UNKNOWN"
    running.watch.release()  # what was let in goes on
    assert (await end_of(call)).finish.reason == api.FINISH_REASON_LENGTH
    assert (await session.read()).handles == [1]


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


async def test_identify_says_that_nobody_is_known_when_nobody_is() -> None:
    async with (
        scheduler_in_process(FakeExecutor()) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        answer = await stub.Identify(api.IdentifyRequest(credential="whatever"))
    assert (answer.knows_callers, answer.may_use_model) == (False, True)
    assert set(answer.scopes) == {scope.value for scope in Scope}


# -- sessions ----------------------------------------------------------------------------------


async def test_gateway_submits_for_others_and_not_for_itself(running: Running) -> None:
    keys = running.keys
    alice, gateway = keys.add("a"), keys.add("", Scope.GATEWAY)
    other_gateway, operator = keys.add("", Scope.GATEWAY), keys.add("", Scope.OPERATOR)
    session = running.session(gateway)
    assert await rejection(session, submission(1)) == "CALLER_NOT_ALLOWED"
    for credential in (gateway, other_gateway, operator):
        assert await rejection(session, submission(1, credential)) == "CALLER_NOT_ALLOWED"
    assert await rejection(session, submission(1, "nobody's")) == "CALLER_UNKNOWN"
    assert await rejection(session, submission(1, "x" * 8193)) == "CALLER_UNKNOWN"
    await running.begin_in(session, submission(1, alice))
    keys.revoke(alice)
    assert await rejection(session, submission(2, alice)) == "CALLER_UNKNOWN"
    assert (await running.refusal(gateway)).reason == "CALLER_NOT_ALLOWED"


async def test_credential_of_another_is_refused_when_a_client_brings_it(running: Running) -> None:
    alice, bob = running.keys.add("a"), running.keys.add("b")
    session = running.session(alice)
    assert await rejection(session, submission(1, bob)) == "CALLER_NOT_ALLOWED"
    await running.begin_in(session, submission(1))


# -- whose requests ----------------------------------------------------------------------------


async def test_id_of_another_tenant_is_as_unknown_as_one_that_never_was(running: Running) -> None:
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
    ("limits", "fields", "reason", "says"),
    [
        ({"max_prompt_tokens": 2}, {}, "PROMPT_TOO_LONG", ("3", "max_prompt_tokens 2")),
        (
            {"max_output_tokens": 59},
            {},
            "SAMPLING_PARAMS_INVALID",
            ("max_tokens is 60", "max_output_tokens 59"),
        ),
        (
            {"max_output_tokens": 59},
            {"params": {"min_tokens": 70}},
            "SAMPLING_PARAMS_INVALID",
            ("min_tokens is 70", "max_output_tokens 59"),
        ),
        (
            {"max_sequences": 2},
            {"params": {"n": 3}},
            "SAMPLING_PARAMS_INVALID",
            ("3", "max_sequences 2"),
        ),
        ({"min_priority": -5}, {"priority": -6}, "CALLER_NOT_ALLOWED", ("-6", "-5 to 100")),
        ({"max_priority": 5}, {"priority": 6}, "CALLER_NOT_ALLOWED", ("6", "-100 to 5")),
        (
            {"adapters": ("mine-*",)},
            {"adapter": "yours"},
            "CALLER_NOT_ALLOWED",
            ("yours", "mine-*"),
        ),
        ({"adapters": ()}, {"adapter": "yours"}, "CALLER_NOT_ALLOWED", ("yours", "none")),
        ({"models": (NO_SUCH_MODEL,)}, {}, "CALLER_NOT_ALLOWED", ("model", NO_SUCH_MODEL)),
    ],
)
async def test_request_is_refused_by_name_when_its_tenant_may_not(
    running: Running,
    limits: dict[str, Any],
    fields: dict[str, Any],
    reason: str,
    says: tuple[str, ...],
) -> None:
    alice, bob = running.keys.add("a"), running.keys.add("b")
    running.keys.limits_of["a"] = TenantLimits(**limits)
    found = await running.refusal(alice, **fields)
    assert found.reason == reason
    assert all(part in found.message for part in ("'a'", *says)), found.message
    if "adapter" not in fields:  # which this executor has not
        await running.begin(bob, **fields)


async def test_request_ends_at_its_tenants_limit_when_it_names_none(running: Running) -> None:
    alice = running.keys.add("a")
    running.keys.limits_of["a"] = TenantLimits(max_output_tokens=5)
    running.watch.release()
    ignoring = {"ignore_eos": True}
    finish = (await end_of(running.generate(alice, params=ignoring))).finish
    assert finish.usage.num_output_tokens == 5
    assert finish.reason == api.FINISH_REASON_LENGTH


async def test_model_is_not_told_to_who_may_not_use_it(running: Running) -> None:
    alice, bob = running.keys.add("a"), running.keys.add("b")
    gateway = running.keys.add("a", Scope.GATEWAY)
    running.keys.limits_of["a"] = TenantLimits(models=(NO_SUCH_MODEL,))
    model = await running.stub.GetModel(api.GetModelRequest(), metadata=bearer(bob))
    assert model == await running.stub.GetModel(api.GetModelRequest(), metadata=bearer(gateway))
    call = running.stub.GetModel(api.GetModelRequest(), metadata=bearer(alice))
    assert (await refused(call)).reason == "CALLER_NOT_ALLOWED"
    files = running.stub.GetTokenizer(api.GetTokenizerRequest(), metadata=bearer(alice))
    assert (await refused(files.read())).reason == "CALLER_NOT_ALLOWED"
