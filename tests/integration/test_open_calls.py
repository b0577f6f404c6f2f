"""Tests bounds of open calls of one tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from scheduler_service.callers import Scope, TenantLimits
from scheduler_service.service import MAX_OPEN_STREAMS, MAX_TOKENIZERS, MAX_TOKENIZERS_AT_ONCE
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_contract import DomainError
from splitserve_rpc import failure_of
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process
from tests.support.security.credentials import KeyRing, LocalCall, bearer

NUM_BYTES = 200_000
MAX_PIECE_BYTES = 64 * 1024
NUM_AT_ONCE = 256


@dataclass
class Running:
    """A scheduler with a tokenizer."""

    scheduler: SchedulerInProcess
    stub: scheduler_pb2_grpc.SchedulerServiceStub
    keys: KeyRing

    def tokenizer(self, credential: str) -> Any:  # noqa: ANN401
        """A call whose caller reads when the test says so."""
        context: Any = LocalCall(credential)
        return self.scheduler.servicer.GetTokenizer(api.GetTokenizerRequest(), context)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(bytes(NUM_BYTES))
    keys = KeyRing()
    executor = FakeExecutor(tokenizer_files={file.name: file})
    async with (
        scheduler_in_process(executor, callers=keys) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        yield Running(scheduler, stub, keys)


def submission(handle: int) -> api.SessionRequest:
    params = api.SamplingParams(max_tokens=1, ignore_eos=True)
    request = api.GenerateRequest(prompt_token_ids=[3], sampling_params=params)
    return api.SessionRequest(submit=api.SessionSubmit(handle=handle, request=request))


async def rejections(session: Any) -> list[str]:  # noqa: ANN401
    """The reasons of all submits that were refused in a Session that is half-closed."""
    reasons: list[str] = []
    while (answer := await session.read()) is not grpc.aio.EOF:
        reasons += [each.rejected.reason for each in answer.events if each.HasField("rejected")]
    return reasons


async def test_tokenizer_comes_in_small_pieces(running: Running) -> None:
    key = running.keys.add("a")
    pieces = [piece.data async for piece in running.tokenizer(key)]
    assert b"".join(pieces) == bytes(NUM_BYTES)
    assert max(map(len, pieces)) <= MAX_PIECE_BYTES


async def test_tokenizer_waits_while_others_are_not_read(
    running: Running,
) -> None:
    key, other_key = running.keys.add("a"), running.keys.add("b")
    unread = [running.tokenizer(key) for _ in range(MAX_TOKENIZERS_AT_ONCE)]
    for call in unread:
        await anext(call)
    waiting = [
        asyncio.ensure_future(anext(running.tokenizer(key)))
        for _ in range(MAX_TOKENIZERS - MAX_TOKENIZERS_AT_ONCE)
    ]
    await asyncio.sleep(0)
    assert not any(call.done() for call in waiting)
    with pytest.raises(DomainError) as refusal:
        await anext(running.tokenizer(key))
    assert (refusal.value.reason, refusal.value.retry_delay_s) == ("QUOTA_EXCEEDED", 1.0)
    assert (await anext(running.tokenizer(other_key))).data

    await unread.pop().aclose()
    async with asyncio.timeout(PATIENCE_S):
        assert (await waiting[0]).data
    for call in waiting:
        call.cancel()


async def test_tokenizer_is_refused_when_its_request_is_padded(running: Running) -> None:
    padded = api.GetTokenizerRequest.FromString(b"\x7a\x80\x10" + bytes(2048))
    call = running.stub.GetTokenizer(padded, metadata=bearer(running.keys.add("a")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert failure_of(caught.value).reason == "MESSAGE_TOO_LARGE"


async def open_sessions(running: Running, metadata: Any, num: int) -> list[Any]:  # noqa: ANN401
    """They are open at the server, too.

    If a thousand came before it looks at the first, gRPC itself would drop some, as CANCELLED.
    """
    calls: list[Any] = []
    while len(calls) < num:
        more = [running.stub.Session(metadata=metadata) for _ in range(NUM_AT_ONCE)]
        # Of a handle that nobody has; when that is sent, so is the call.
        nothing = api.SessionRequest(abort=api.SessionAbort(handle=1))
        await asyncio.gather(*(call.write(nothing) for call in more))
        await running.stub.GetModel(api.GetModelRequest(), metadata=metadata)
        calls += more
    return calls


async def test_stream_is_refused_when_its_tenant_has_too_many(
    running: Running,
) -> None:
    metadata = bearer(running.keys.add("a"))
    assert MAX_OPEN_STREAMS % NUM_AT_ONCE == 0
    calls = await open_sessions(running, metadata, MAX_OPEN_STREAMS)
    calls.append(running.stub.Session(metadata=metadata))
    reads = [asyncio.ensure_future(call.read()) for call in calls]
    done, open_ = await asyncio.wait(reads, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(open_)) == (1, MAX_OPEN_STREAMS)
    error = done.pop().exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    failure = failure_of(error)
    assert (failure.reason, failure.retry_delay_s) == ("QUOTA_EXCEEDED", 1.0)
    assert "'a'" in failure.message

    other = running.stub.Session(metadata=bearer(running.keys.add("b")))
    await other.write(submission(1))
    assert (await asyncio.wait_for(other.read(), PATIENCE_S)).handles == [1]
    for call in calls:
        call.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.parametrize(
    ("scopes", "slept_s"),
    [((Scope.GENERATE,), [0.01, 0.02, 0.04]), ((Scope.GENERATE, Scope.TENANTS), [])],
)
async def test_session_is_read_more_slowly_beyond_its_quota(
    scopes: tuple[Scope, ...], slept_s: list[float]
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    keys = KeyRing()
    keys.limits_of["a"] = TenantLimits(requests_per_minute=1e-3)
    async with (
        scheduler_in_process(FakeExecutor(), callers=keys, sleep=sleep) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        session = stub.Session(metadata=bearer(keys.add("a", *scopes)))
        for handle in range(4):
            await session.write(submission(handle))
        await session.done_writing()
        assert await rejections(session) == ["QUOTA_EXCEEDED"] * 3
    assert slept == slept_s
