"""Tests that every refusal of every rpc has a reason, whatever message is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import admin_pb2, live_pb2, registry_pb2, scheduler_pb2
from splitserve_rpc import CODE_OF_REASON
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Descriptors have two classes, the types of one of them.
Field: TypeAlias = Any
# What gRPC of this process says in place of the status when a call had ended before it could write.
WRITTEN_TOO_LATE = "Internal error from Core"
# No message begins with the end of a group.
UNDECODABLE = b"\x0c\xff\xff"
STANDARD = (health_pb2, reflection_pb2)
SERVICES = {
    "scheduler": (scheduler_pb2, registry_pb2, admin_pb2, live_pb2, *STANDARD),
    "executor": (executor_pb2, *STANDARD),
}


@dataclass(frozen=True, slots=True)
class Running:
    """A scheduler that an executor has joined, one that none has, and the ways there."""

    scheduler: SchedulerInProcess
    channels: dict[str, grpc.aio.Channel]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    executor = FakeExecutor()
    async with scheduler_in_process(executor) as scheduler, scheduler_in_process() as alone:
        addresses = {
            "scheduler": scheduler.address,
            "executor": executor.address,
            "alone": alone.address,
        }
        # A client may send more than is taken: that is one of the tests.
        options = [("grpc.max_send_message_length", -1)]
        channels = {
            name: grpc.aio.insecure_channel(address, options) for name, address in addresses.items()
        }
        yield Running(scheduler, channels)
        for channel in channels.values():
            await channel.close()


@pytest.fixture(autouse=True)
def _nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a client does wrong is no news for the operator, and certainly no traceback."""
    with caplog.at_level(logging.WARNING):
        yield
    assert [record.getMessage() for record in caplog.records] == []


def methods_of(server: str) -> list[MethodDescriptor]:
    services: list[ServiceDescriptor] = [
        service
        for module in SERVICES[server]
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    return [method for service in services for method in service.methods]


METHODS = [
    pytest.param(server, method, id=f"{server}-{method.containing_service.name}.{method.name}")
    for server in SERVICES
    for method in methods_of(server)
]


async def refusal(
    channel: grpc.aio.Channel, path: str, *messages: bytes, streams: bool = True
) -> tuple[str, str]:
    """Reason and message of how `messages` are refused; a status without ErrorInfo fails."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(channel, path, *messages, streams=streams)
        if caught.value.details() != WRITTEN_TOO_LATE:
            return reason_of(caught.value)


async def answers(
    channel: grpc.aio.Channel, path: str, *messages: bytes, streams: bool = True
) -> list[bytes]:
    """All that comes back when `messages` are sent. A unary method takes a stream of one."""
    call = (channel.stream_stream if streams else channel.unary_unary)(path)
    if not streams:
        return [await call(messages[0], timeout=PATIENCE_S)]
    stream = call(timeout=PATIENCE_S)
    for message in messages:
        await stream.write(message)
    await stream.done_writing()
    return [answer async for answer in stream]


def reason_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    status = rpc_status.from_call(error)
    assert status is not None, f"no details: {error.code()} {error.details()}"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "splitserve"
    assert CODE_OF_REASON[info.reason] is error.code()
    text = error.details() or ""
    assert text
    assert "\n" not in text
    return info.reason, text


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@pytest.mark.parametrize(("server", "method"), METHODS)
async def test_call_is_refused_by_name_when_its_message_cannot_be_decoded(
    running: Running, server: str, method: MethodDescriptor
) -> None:
    channel = running.channels[server]
    is_unary = not (method.client_streaming or method.server_streaming)
    # Health takes 1 KiB.
    num_times = 100 if "grpc.health" in path_of(method) else 10_000
    for message in (UNDECODABLE, UNDECODABLE * num_times):
        reason, text = await refusal(channel, path_of(method), message, streams=not is_unary)
        assert reason == "MESSAGE_UNDECODABLE"
        assert path_of(method) in text
        assert str(len(message)) in text


@pytest.mark.parametrize(("server", "method"), METHODS)
async def test_call_is_refused_by_name_when_its_message_is_too_large(
    running: Running, server: str, method: MethodDescriptor
) -> None:
    limit = {"scheduler": running.scheduler.cluster.served.max_message_bytes, "executor": 2**26}[
        server
    ]
    if method.containing_service.name == "Health":
        limit = 1024
    channel = running.channels[server]
    reason, text = await refusal(channel, path_of(method), bytes(limit + 1))
    assert reason == "MESSAGE_TOO_LARGE"
    assert f"{limit + 1} bytes; allowed: at most {limit}" in text


@pytest.mark.parametrize("server", SERVICES)
@pytest.mark.parametrize("path", ["/splitserve.scheduler.v1.SchedulerService/No", "/no.Service/No"])
@pytest.mark.parametrize("streams", [False, True])
async def test_call_is_refused_by_name_when_there_is_no_such_method(
    running: Running, server: str, path: str, streams: bool
) -> None:
    reason, text = await refusal(running.channels[server], path, b"", streams=streams)
    assert reason == "METHOD_UNKNOWN"
    assert path in text


def spoilt(message: Message) -> Iterator[Message]:
    """`message` with each field in turn at the edges of its type."""
    for field in message.DESCRIPTOR.fields:
        for value in edges_of(field):
            changed = type(message)()
            changed.CopyFrom(message)
            set_field(changed, field, value)
            yield changed


EDGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 2**63 - 1),
    FieldDescriptor.CPPTYPE_STRING: ("\u4e2d" * 60_000, "\0\n"),
    FieldDescriptor.CPPTYPE_FLOAT: (float("nan"), float("inf"), -1e30),
    FieldDescriptor.CPPTYPE_ENUM: (99, -1),
    FieldDescriptor.CPPTYPE_BOOL: (True,),
}


def edges_of(field: Field) -> Iterator[object]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        yield b"\xff"
    elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
        empty = GetMessageClass(field.message_type)()
        yield empty
        yield from spoilt(empty)
    elif field.message_type is None:
        yield from EDGES[field.cpp_type]


def set_field(message: Message, field: Field, value: object) -> None:
    place = getattr(message, field.name)
    if field.is_repeated:
        place.extend([value] * 3)
    elif field.message_type is not None:
        place.SetInParent()
        place.CopyFrom(value)
    else:
        setattr(message, field.name, value)


@pytest.mark.parametrize(
    ("server", "method"),
    [case for case in METHODS if "Watch" not in str(case.id)],  # it never ends
)
async def test_errors_have_reasons_when_fields_make_no_sense(
    running: Running, server: str, method: MethodDescriptor
) -> None:
    channel = running.channels[server]
    empty = GetMessageClass(method.input_type)()
    cases = [case.SerializeToString() for case in (empty, *spoilt(empty))]
    results = await asyncio.gather(
        *(answers(channel, path_of(method), case) for case in cases), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            assert isinstance(result, grpc.aio.AioRpcError)
            assert reason_of(result)[0] != "INVARIANT_BROKEN"


@pytest.mark.parametrize(
    "method",
    [m for m in methods_of("scheduler") if m.name in ("Generate", "GetModel", "GetTokenizer")],
    ids=lambda method: method.name,
)
async def test_errors_have_reasons_when_no_executor_is_there(
    running: Running, method: MethodDescriptor
) -> None:
    reason, _ = await refusal(running.channels["alone"], path_of(method), b"")
    assert reason == "MODEL_NOT_READY"


async def test_session_ends_by_name_when_a_later_message_cannot_be_decoded(
    running: Running,
) -> None:
    path = "/splitserve.scheduler.v1.SchedulerService/Session"
    submit = scheduler_pb2.SessionSubmit(
        handle=1, request=scheduler_pb2.GenerateRequest(prompt_token_ids=[1, 2])
    )
    first = scheduler_pb2.SessionRequest(submit=submit).SerializeToString()
    reason, _ = await refusal(running.channels["scheduler"], path, first, UNDECODABLE)
    assert reason == "MESSAGE_UNDECODABLE"


async def test_own_fault_has_a_reason_and_a_traceback(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        type(running.scheduler.cluster.served), "max_model_len", property(lambda _: 1 / 0)
    )
    path = "/splitserve.scheduler.v1.SchedulerService/GetModel"
    reason, text = await refusal(running.channels["scheduler"], path, b"")
    assert reason == "INVARIANT_BROKEN"
    assert "division" not in text
    (record,) = caplog.records
    assert record.exc_info
    caplog.clear()
