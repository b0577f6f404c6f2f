"""A scheduler process that knows its callers by files: what strangers and tenants reach of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from splitserve.scheduler.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2_grpc
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.errors import RpcFailure, failure_of
from tests.contract.stranger.process import poll, running_scheduler
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import DIGEST, StepWatch
from tests.support.security.bearer import bearer
from tests.support.security.everything import METHODS, outcome
from tests.support.security.key_file import KeyFile

SERVICE = "/splitserve.scheduler.v1.SchedulerService"


@dataclass(frozen=True, slots=True)
class Running:
    """A scheduler with an executor that is held by `watch`, and keys."""

    channel: grpc.aio.Channel
    watch: StepWatch
    files: KeyFile
    operator: str

    @property
    def stub(self) -> scheduler_pb2_grpc.SchedulerServiceStub:
        return scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    def generate(self, key: str, request_id: str) -> Any:  # noqa: ANN401
        params = api.SamplingParams(max_tokens=60, ignore_eos=True)
        request = api.GenerateRequest(
            prompt_token_ids=[1, 2, 3], sampling_params=params, request_id=request_id
        )
        return self.stub.Generate(request, metadata=bearer(key))

    async def begin(self, key: str, request_id: str) -> Any:  # noqa: ANN401
        """A stream that has its first token, after a few steps."""
        self.watch.hold()
        num_before = num_requests(await self.listed())
        call = self.generate(key, request_id)

        async def ask() -> tuple[bool, object]:
            listed = await self.listed()
            return num_requests(listed) > num_before, listed

        # Others would use up the steps before it is there.
        await poll(ask)
        self.watch.hold(after=4)
        assert (await call.read()).tokens.token_ids
        return call

    async def listed(self) -> admin_pb2.ListExecutorsResponse:
        """What the operator is told."""
        admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        request = admin_pb2.ListExecutorsRequest()
        listed: admin_pb2.ListExecutorsResponse = await admin.ListExecutors(
            request, metadata=bearer(self.operator)
        )
        return listed

    async def model_refusal(self, key: str) -> str:
        """Why the model is not told; empty if it is."""
        try:
            await self.stub.GetModel(api.GetModelRequest(), metadata=bearer(key))
        except grpc.aio.AioRpcError as error:
            return failure_of(error).reason
        return ""

    async def wait_refused(self, key: str) -> None:
        async def ask() -> tuple[bool, str]:
            reason = await self.model_refusal(key)
            return reason == "CALLER_UNKNOWN", reason

        await poll(ask)

    async def wait_known(self, key: str) -> None:
        async def ask() -> tuple[bool, str]:
            reason = await self.model_refusal(key)
            return reason == "", reason

        await poll(ask)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    files, watch = KeyFile(tmp_path), StepWatch()
    operator = files.add("us", "--scope=operator")
    files.tenants.write_text("[tenants.small]\nmax_concurrent_requests = 1\n")
    executor = FakeExecutor(fault=watch)
    async with (
        running_scheduler(api_keys=files.path, tenants=files.tenants) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        executor.scheduler_address, executor.digest = scheduler.address, DIGEST
        async with executor:
            found = Running(channel, watch, files, operator)

            async def ask() -> tuple[bool, object]:
                listed = await found.listed()
                return any(state.connected for state in listed.executors), listed

            await poll(ask)
            yield found
            watch.release()


def num_requests(listed: admin_pb2.ListExecutorsResponse) -> int:
    return listed.num_unassigned_requests + sum(
        state.num_running_requests + state.num_waiting_requests + state.num_swapped_requests
        for state in listed.executors
    )


async def refused(call: Any) -> RpcFailure:  # noqa: ANN401
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return failure_of(caught.value)


async def test_stranger_is_refused_by_all_that_is_for_callers(running: Running) -> None:
    forged = running.operator[:-1] + ("A" if running.operator[-1] != "A" else "B")
    for metadata in ((), bearer("nonsense"), bearer(forged)):
        for method in METHODS:
            if method.split("/")[1].endswith(("SchedulerService", "AdminService")):
                found = await outcome(running.channel, method, metadata=metadata)
                assert found == "CALLER_UNKNOWN", method


async def test_tenant_cannot_reach_a_request_of_another_by_its_id(running: Running) -> None:
    alice, bob = running.files.add("alice"), running.files.add("bob")
    await running.wait_known(bob)
    call = await running.begin(alice, "mine")
    never = await refused(
        running.stub.Abort(api.AbortRequest(request_id="ours"), metadata=bearer(bob))
    )
    for request_id in ("mine", "5:alice:mine"):
        abort = running.stub.Abort(api.AbortRequest(request_id=request_id), metadata=bearer(bob))
        refusal = await refused(abort)
        assert refusal.reason == "REQUEST_UNKNOWN"
        assert refusal.message == never.message.replace("ours", request_id)
    second = await running.begin(bob, "mine")
    await running.stub.Abort(api.AbortRequest(request_id="mine"), metadata=bearer(bob))
    running.watch.release()
    ends = [await end_of(stream) for stream in (call, second)]
    assert [end.finish.reason for end in ends] == [
        api.FINISH_REASON_LENGTH,
        api.FINISH_REASON_ABORTED,
    ]
    assert {end.request_id for end in ends} == {"mine"}


async def test_key_of_a_gateway_generates_nothing_by_itself(running: Running) -> None:
    gateway, alice = running.files.add("g", "--scope=gateway"), running.files.add("alice")
    await running.wait_known(alice)
    assert (await refused(running.generate(gateway, "x").read())).reason == "CALLER_NOT_ALLOWED"
    session = running.stub.Session(metadata=bearer(gateway))
    request = api.GenerateRequest(prompt_token_ids=[1])
    for credential, reason in (("", "CALLER_NOT_ALLOWED"), ("sk-ss-x", "CALLER_UNKNOWN")):
        submit = api.SessionSubmit(handle=1, request=request, credential=credential)
        await session.write(api.SessionRequest(submit=submit))
        (event,) = (await session.read()).events
        assert event.rejected.reason == reason
    asked = api.IdentifyRequest(credential=alice)
    answer = await running.stub.Identify(asked, metadata=bearer(gateway))
    assert (answer.tenant, answer.may_use_model) == ("alice", True)


async def test_key_is_refused_while_serving_once_it_is_revoked(running: Running) -> None:
    alice = running.files.add("alice")
    await running.wait_known(alice)
    call = await running.begin(alice, "x")
    running.files.revoke(alice)
    await running.wait_refused(alice)
    assert (await refused(running.generate(alice, "y").read())).reason == "CALLER_UNKNOWN"
    running.watch.release()  # what was let in ends well
    assert (await end_of(call)).finish.reason == api.FINISH_REASON_LENGTH


async def test_limits_of_tenants_hold_and_change_while_serving(running: Running) -> None:
    small = running.files.add("small")
    await running.wait_known(small)
    call = await running.begin(small, "x")
    refusal = await refused(running.generate(small, "y").read())
    assert (refusal.reason, refusal.retry_delay_s) == ("QUOTA_EXCEEDED", 1)
    running.files.tenants.write_text("[tenants.small]\nmodels = ['another-*']\n")

    async def ask() -> tuple[bool, str]:
        reason = await running.model_refusal(small)
        return reason == "CALLER_NOT_ALLOWED", reason

    await poll(ask)
    running.watch.release()
    assert (await end_of(call)).finish.reason == api.FINISH_REASON_LENGTH


async def end_of(call: Any) -> api.GenerateResponse:  # noqa: ANN401
    """The last message of a stream."""
    last = api.GenerateResponse()
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    return last
