from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from executor_service.service import (
    GrpcRegistry,
    Pacing,
    Registrar,
    RegistrationFailed,
    advertised_address,
)
from executor_service.steps import ExecutorInfo
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_contract import DomainError
from splitserve_rpc import bind_server
from tests.support.steps.step_driver import make_executor_info

INFO = make_executor_info(executor_epoch=7, address="127.0.0.1:9")
REFUSED = RegistrationFailed("registration_refused", {"reason": "MODEL_MISMATCH", "message": "no"})
UNREACHABLE = RegistrationFailed("scheduler_unreachable", {"code": "UNAVAILABLE"})


class _Enough(Exception):
    """The script of a test has ended."""


@dataclass(slots=True)
class _Script:
    """A registry that answers from a list, and a clock that only notes how long was slept."""

    answers: list[int | Exception]
    slept: list[float] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    is_watched: bool = False

    async def register(self, info: ExecutorInfo) -> int:
        if not self.answers:
            raise _Enough
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)

    async def describe(self) -> ExecutorInfo:
        return INFO

    async def wait_unwatched(self) -> None:
        if self.is_watched:
            raise _Enough

    async def run(self, random: Callable[[], float] = lambda: 0.5) -> None:
        pacing = Pacing(self.sleep, random)
        registrar = Registrar(self, self.describe, self.wait_unwatched, self.adopted.append, pacing)
        with pytest.raises(_Enough):
            await registrar.run()


@pytest.mark.parametrize(
    ("answers", "slept"),
    [
        # Registered, and no stream opens.
        ([5, 5, 5], [1.0, 1.0, 1.0]),
        # No scheduler.
        ([UNREACHABLE] * 6, [0.25, *[0.5] * 5]),
        ([REFUSED] * 600, [0.25, 0.5, 1.0, *[2.0] * 597]),
        ([UNREACHABLE, UNREACHABLE, 5, UNREACHABLE], [0.25, 0.5, 1.0, 0.25]),
    ],
    ids=["no stream", "no scheduler", "refused", "failure after success"],
)
async def test_registrar_waits_by_what_it_was_answered(
    answers: list[int | Exception], slept: list[float]
) -> None:
    script = _Script(list(answers))
    await script.run()
    assert script.slept == slept


@pytest.mark.parametrize(("number", "delay_s"), [(0.0, 0.8), (1.0, 1.2)])
async def test_registrar_jitters_by_a_fifth_when_it_waits(number: float, delay_s: float) -> None:
    script = _Script([5])
    await script.run(lambda: number)
    assert script.slept == pytest.approx([delay_s])


async def test_registrar_does_not_register_when_a_stream_is_open() -> None:
    script = _Script([5], is_watched=True)
    await script.run()
    assert script.answers == [5]


async def test_registrar_adopts_nothing_when_the_scheduler_comes_from_the_future(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = _Script([2**63 - 1, 5])
    await script.run()
    assert script.adopted == [5]
    assert "reason=FUTURE_SCHEDULER_EPOCH" in caplog.text


async def test_registrar_adopts_epoch_when_it_is_registered() -> None:
    script = _Script([OSError("no such name"), 5, UNREACHABLE, 6])
    await script.run()
    assert script.adopted == [5, 6]


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        (
            [*[UNREACHABLE] * 5, 5, 5, REFUSED, REFUSED, 5, 6],
            "scheduler_unreachable registered registration_refused registered registered",
        ),
        # Gone for a moment.
        ([5, UNREACHABLE, UNREACHABLE, 5], "registered"),
    ],
)
async def test_registrar_logs_once_when_nothing_changes(
    answers: list[int | Exception], lines: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await _Script(list(answers)).run()
    assert [record.getMessage().split()[0] for record in caplog.records] == lines.split()


async def test_registrar_logs_each_problem_once_when_they_take_turns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    other = RegistrationFailed("scheduler_unreachable", {"code": "INTERNAL"})
    await _Script([*[UNREACHABLE, other] * 5, 5, *[UNREACHABLE, other] * 5]).run()
    assert [record.getMessage() for record in caplog.records if "code" in record.getMessage()] == [
        # The first ones of a moment are no news.
        *(str(UNREACHABLE), str(other)),
        *(str(UNREACHABLE), str(other)),
    ]


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        # The route to the scheduler.
        ("0.0.0.0:0", "127.0.0.1:77"),
        ("[::]:0", "127.0.0.1:77"),
        ("10.1.2.3:0", "10.1.2.3:77"),
    ],
)
async def test_address_is_one_that_the_scheduler_can_reach(listen: str, address: str) -> None:
    assert await advertised_address(listen, 77, "127.0.0.1:50051") == address


class _Servicer(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self) -> None:
        self.requests: list[registry_pb2.RegisterRequest] = []
        self.error: DomainError | None = None
        self.major = 1

    async def Register(  # noqa: N802
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> registry_pb2.RegisterResponse:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return registry_pb2.RegisterResponse(
            scheduler_epoch=42, contract_version=pb.ContractVersion(major=self.major)
        )

    async def FetchAdapter(  # noqa: N802
        self, request: registry_pb2.FetchAdapterRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[registry_pb2.FetchAdapterResponse]:
        yield registry_pb2.FetchAdapterResponse(file_name=request.digest, data=b"first bytes")
        if self.error is not None:
            raise self.error


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[_Servicer, GrpcRegistry]]:
    running = bind_server("127.0.0.1:0", ())
    servicer = _Servicer()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, running.server)
    await running.server.start()
    registry = GrpcRegistry(f"127.0.0.1:{running.port}")
    yield servicer, registry
    await running.server.stop(None)


async def test_registry_returns_epoch_when_the_scheduler_accepts(
    scheduler: tuple[_Servicer, GrpcRegistry],
) -> None:
    servicer, registry = scheduler
    assert await registry.register(INFO) == 42
    assert servicer.requests[0].executor.executor_epoch == 7


async def test_registry_names_reason_when_the_scheduler_refuses(
    scheduler: tuple[_Servicer, GrpcRegistry],
) -> None:
    servicer, registry = scheduler
    servicer.error = DomainError("MODEL_MISMATCH", "digest is a, not b")
    with pytest.raises(RegistrationFailed) as caught:
        await registry.register(INFO)
    assert str(caught.value) == (
        "registration_refused reason=MODEL_MISMATCH message='digest is a, not b'"
    )


async def test_registry_refuses_when_the_scheduler_speaks_another_major(
    scheduler: tuple[_Servicer, GrpcRegistry],
) -> None:
    servicer, registry = scheduler
    servicer.major = 2
    with pytest.raises(RegistrationFailed, match="CONTRACT_VERSION_MISMATCH"):
        await registry.register(INFO)


async def test_registry_says_unreachable_when_nobody_listens(
    unused_tcp_port: int,
) -> None:
    registry = GrpcRegistry(f"127.0.0.1:{unused_tcp_port}")
    said = "scheduler_unreachable .* over=plain_text code=UNAVAILABLE details='.*Connection refused"
    with pytest.raises(RegistrationFailed, match=said):
        await registry.register(INFO)


async def test_registry_yields_files_of_adapters(
    scheduler: tuple[_Servicer, GrpcRegistry],
) -> None:
    _, registry = scheduler
    assert [chunk async for chunk in registry.fetch_adapter("ab")] == [("ab", b"first bytes")]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("DRAINING", "SCHEDULER_UNREACHABLE"),
        ("ADAPTER_UNKNOWN", "ADAPTER_UNKNOWN"),
        ("CALLER_NOT_ALLOWED", "ADAPTER_INVALID"),
    ],
)
async def test_registry_says_whether_files_may_come_later_when_they_are_cut(
    scheduler: tuple[_Servicer, GrpcRegistry], reason: str, expected: str
) -> None:
    servicer, registry = scheduler
    servicer.error = DomainError(reason, "no more")
    with pytest.raises(DomainError, match="no more") as cut:
        _ = [chunk async for chunk in registry.fetch_adapter("ab")]
    assert cut.value.reason == expected
