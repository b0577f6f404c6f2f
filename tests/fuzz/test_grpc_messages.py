"""Random messages to every method get an answer or a reason, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.callers import TenantLimits
from splitserve.scheduler.v1 import admin_pb2, registry_pb2
from splitserve.scheduler.v1 import scheduler_pb2 as api
from tests.contract.stranger.process import poll
from tests.fuzz.mutations import messages, mutated
from tests.fuzz.running import Running, fuzzing, running
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process
from tests.support.security.credentials import KeyRing, bearer

_PACKAGE = "/splitserve.scheduler.v1"
_CLIENTS = f"{_PACKAGE}.SchedulerService"
# The service, the message, and whether a stream of them is sent.
METHODS: dict[str, tuple[Any, bool]] = {
    f"{_CLIENTS}/Generate": (api.GenerateRequest, False),
    f"{_CLIENTS}/Session": (api.SessionRequest, True),
    f"{_CLIENTS}/Abort": (api.AbortRequest, False),
    f"{_CLIENTS}/GetModel": (api.GetModelRequest, False),
    f"{_CLIENTS}/GetTokenizer": (api.GetTokenizerRequest, False),
    f"{_CLIENTS}/Identify": (api.IdentifyRequest, False),
    f"{_PACKAGE}.RegistryService/Register": (registry_pb2.RegisterRequest, False),
    f"{_PACKAGE}.AdminService/ListExecutors": (admin_pb2.ListExecutorsRequest, False),
}
# Of ours, nobody's fault but ours.
FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
BROKEN = b"INVARIANT_BROKEN"
# What the library here says of a call that was over when it had more to write.
OURS = "Internal error from Core"
VALID = api.GenerateRequest(
    prompt_token_ids=[3, 4, 5],
    request_id="r1",
    tenant="acme",
    sampling_params=api.SamplingParams(
        max_tokens=4, temperature=0.5, top_k=3, seed=7, stop_token_ids=[1]
    ),
)
SUBMIT = api.SessionRequest(submit=api.SessionSubmit(handle=1, request=VALID))
# Whatever a request may ask for, an example is over after so many answers or so long.
_MOST_ANSWERS = 3
_MOST_S = 0.5


@dataclass(frozen=True, slots=True)
class Attacked:
    scheduler: SchedulerInProcess
    executor: FakeExecutor
    channel: grpc.aio.Channel
    credential: str

    async def send(self, method: str, sent: list[bytes], credential: str) -> None:
        """Nothing but a reason comes of it, or an answer that says no fault of ours."""
        call = self.channel.stream_stream(method)(metadata=bearer(credential), timeout=_MOST_S)
        try:
            for message in sent:
                await call.write(message)
            await call.done_writing()
            for _ in range(_MOST_ANSWERS):
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    break
                assert BROKEN not in answer, answer
        except (grpc.aio.BaseError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # how it ended is looked at below
        call.cancel()
        try:
            code = await call.code()
        except asyncio.CancelledError:
            return
        details = await call.details()
        assert code not in FAULTS or details == OURS, details

    async def check_nothing_is_left(self) -> None:
        """No request, no block, no stream; and what is asked for next is answered."""
        cluster = self.scheduler.cluster
        (engine,) = cluster.executors

        async def look() -> tuple[bool, object]:
            left = (
                cluster.num_unfinished,
                self.executor.num_device_blocks - engine.engine.num_free_blocks,
            )
            return not any(left), left

        await poll(look, PATIENCE_S)
        assert self.executor.violations == []


@asynccontextmanager
async def attacked(keys: KeyRing | None) -> AsyncIterator[Attacked]:
    executor = FakeExecutor()
    async with (
        scheduler_in_process(executor, callers=keys) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        credential = "" if keys is None else keys.add("acme")
        yield Attacked(scheduler, executor, channel, credential)


@pytest.fixture(scope="module", params=["open", "keys"])
def target(request: pytest.FixtureRequest) -> Iterator[Running[Attacked]]:
    keys = None
    if request.param == "keys":
        keys = KeyRing()
        keys.limits_of["acme"] = TenantLimits(
            requests_per_minute=1e6, max_output_tokens=40, adapters=("a*",), max_priority=5
        )
    with running(attacked(keys)) as started:
        yield started
        started.run(started.target.check_nothing_is_left())


@fuzzing
@given(data=st.data(), method=st.sampled_from(sorted(METHODS)), is_known=st.booleans())
def test_message_is_answered_or_refused_when_its_fields_are_anything(
    target: Running[Attacked], data: st.DataObject, method: str, is_known: bool
) -> None:
    kind, is_stream = METHODS[method]
    many = st.lists(messages(kind.DESCRIPTOR), min_size=1, max_size=4 if is_stream else 1)
    sent = [message.SerializeToString() for message in data.draw(many)]
    credential = target.target.credential if is_known else data.draw(st.text("abc ~", max_size=9))

    target.run(target.target.send(method, sent, credential))


@fuzzing
@given(data=st.data(), method=st.sampled_from(sorted(METHODS)))
def test_message_is_answered_or_refused_when_its_bytes_are_anything(
    target: Running[Attacked], data: st.DataObject, method: str
) -> None:
    valid = SUBMIT if METHODS[method][1] else VALID
    anything = st.binary(max_size=64) | mutated(valid.SerializeToString())
    sent = data.draw(st.lists(anything, min_size=1, max_size=3))

    target.run(target.target.send(method, sent, target.target.credential))
