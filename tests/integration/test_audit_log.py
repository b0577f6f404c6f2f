"""Tests what the audit log has of callers, requests and executors; prompts are not in it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from scheduler_service.audit import EventFile, FileAudit
from scheduler_service.callers import Scope, TenantLimits
from splitserve.scheduler.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    scheduler_pb2_grpc,
)
from splitserve.scheduler.v1 import scheduler_pb2 as api
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.scheduler_in_process import scheduler_in_process
from tests.support.security.credentials import KeyRing, bearer

PROMPT = [31, 41, 59, 26]


@dataclass(frozen=True, slots=True)
class Audited:
    keys: KeyRing
    channel: grpc.aio.Channel
    audit: FileAudit
    path: Path

    @property
    def stub(self) -> scheduler_pb2_grpc.SchedulerServiceStub:
        return scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    async def generate(self, credential: str, **fields: Any) -> bool:  # noqa: ANN401
        """To its end, or until it is refused; whether it was not."""
        call = self.stub.Generate(request(**fields), metadata=bearer(credential))
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            return False
        return True

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        self.audit.close()
        events = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [
            {name: event[name] for name in event if name != "time"}
            for event in events
            if event["event"] in kinds
        ]


def request(**fields: Any) -> api.GenerateRequest:  # noqa: ANN401
    params = api.SamplingParams(max_tokens=fields.pop("max_tokens", 5), ignore_eos=True)
    return api.GenerateRequest(prompt_token_ids=PROMPT, sampling_params=params, **fields)


@pytest.fixture
async def audited(tmp_path: Path) -> AsyncIterator[Audited]:
    path, keys = tmp_path / "audit", KeyRing()
    audit = FileAudit(EventFile(path))
    async with (
        scheduler_in_process(FakeExecutor(), callers=keys, audit=audit) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        yield Audited(keys, channel, audit, path)
    audit.close()


async def test_request_is_told_from_its_admission_to_its_end(audited: Audited) -> None:
    credential = audited.keys.add("acme")

    await audited.generate(credential, request_id="r1", tenant="somebody else")

    assert audited.events("request_admitted", "request_ended") == [
        {
            "event": "request_admitted",
            "caller": "key0",
            "tenant": "acme",
            "request_id": "r1",
            "num_prompt_tokens": 4,
            "max_tokens": 5,
            "num_sequences": 1,
            "model": "fake",
            "adapter": "",
        },
        {
            "event": "request_ended",
            "tenant": "acme",
            "request_id": "r1",
            "reason": "length",
            "num_output_tokens": 5,
        },
    ]


async def test_request_of_a_session_is_told_as_any_other(audited: Audited) -> None:
    gateway = audited.keys.add("", Scope.GATEWAY)
    credential = audited.keys.add("acme")
    session = audited.stub.Session(metadata=bearer(gateway))
    for handle, shown in ((1, credential), (2, "nobody's")):
        submit = api.SessionSubmit(
            handle=handle, credential=shown, request=request(request_id=f"r{handle}")
        )
        await session.write(api.SessionRequest(submit=submit))
    await session.done_writing()
    async for _ in session:
        pass

    ended, refused = audited.events("request_ended", "caller_refused")
    if ended["event"] == "caller_refused":
        ended, refused = refused, ended
    assert (ended["tenant"], ended["request_id"], ended["reason"]) == ("acme", "r1", "length")
    assert refused["reason"] == "CALLER_UNKNOWN"
    assert refused["method"].endswith("/Session")
    # Nobody knows whose credential that was: who brought it is told.
    assert refused["caller"] == "key0"
    assert refused["peer"].startswith("ipv4:127.0.0.1:")


@pytest.mark.parametrize(
    ("limits", "limit", "reason", "max_tokens"),
    [
        (TenantLimits(max_prompt_tokens=3), "max_prompt_tokens", "PROMPT_TOO_LONG", 5),
        (TenantLimits(max_concurrent_requests=0), "max_concurrent_requests", "QUOTA_EXCEEDED", 5),
        (TenantLimits(models=("x",)), "models", "CALLER_NOT_ALLOWED", 5),
        (TenantLimits(), "", "SAMPLING_PARAMS_INVALID", -1),
    ],
)
async def test_refusal_names_the_limit(
    audited: Audited, limits: TenantLimits, limit: str, reason: str, max_tokens: int
) -> None:
    credential = audited.keys.add("acme")
    audited.keys.limits_of["acme"] = limits

    await audited.generate(credential, request_id="r1", max_tokens=max_tokens)

    assert audited.events("request_refused", "request_admitted") == [
        {
            "event": "request_refused",
            "caller": "key0",
            "tenant": "acme",
            "request_id": "r1",
            "reason": reason,
            "limit": limit,
            "num_times": 1,
        }
    ]


async def test_request_is_abandoned_when_its_client_leaves(audited: Audited) -> None:
    credential = audited.keys.add("acme")
    call = audited.stub.Generate(request(max_tokens=1000), metadata=bearer(credential))
    await call.read()
    call.cancel()
    # Refused for as long as the first is there.
    audited.keys.limits_of["acme"] = TenantLimits(max_concurrent_requests=1)

    async def is_over() -> tuple[bool, None]:
        return await audited.generate(credential, request_id="later"), None

    await poll(is_over)

    first = audited.events("request_ended")[0]
    assert first["reason"] in ("abandoned", "aborted")
    assert first["num_output_tokens"] < 1000


async def test_log_has_operators_and_refused_callers(audited: Audited) -> None:
    await audited.generate("nobody's")
    operator = audited.keys.add("", Scope.OPERATOR)
    await audited.generate(operator)
    stub = admin_pb2_grpc.AdminServiceStub(audited.channel)
    await stub.ListExecutors(admin_pb2.ListExecutorsRequest(), metadata=bearer(operator))

    unknown, forbidden, called = audited.events("caller_refused", "operator_called")
    assert unknown["method"].endswith("SchedulerService/Generate")
    assert (unknown["reason"], unknown["num_times"]) == ("CALLER_UNKNOWN", 1)
    assert forbidden["reason"] == "CALLER_NOT_ALLOWED"
    assert called["method"] == "ListExecutors"
    assert called["peer"].startswith("ipv4:127.0.0.1:")
    assert [each["caller"] for each in (unknown, forbidden, called)] == ["", "key0", "key0"]


async def test_executors_are_told(tmp_path: Path) -> None:
    path, executor = tmp_path / "audit", FakeExecutor()
    audit = FileAudit(EventFile(path))
    async with scheduler_in_process(executor, audit=audit) as scheduler:
        wrong = registry_pb2.RegisterRequest()
        async with grpc.aio.insecure_channel(scheduler.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await registry_pb2_grpc.RegistryServiceStub(channel).Register(wrong)
        await executor.stop()
        while scheduler.cluster.executors:
            await scheduler.changed.wait()
            scheduler.changed.clear()
        audit.close()
        await executor.start()

    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events] == [
        "executor_registered",
        "executor_refused",
        "executor_lost",
    ]
    registered, refused, lost = events
    assert registered["model"] == "fake"
    assert registered["address"] == lost["address"]
    assert refused["reason"] == "CONTRACT_VERSION_MISMATCH"


async def test_nothing_of_what_was_said_is_there(audited: Audited) -> None:
    credential = audited.keys.add("acme")
    await audited.generate(credential, request_id="r1")
    await audited.generate(credential, max_tokens=-77777)
    audited.audit.close()

    text = audited.path.read_text()
    assert credential not in text
    assert "31, 41" not in text
    assert "77777" not in text
