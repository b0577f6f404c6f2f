"""Register: what is refused, what is harmless; health and reflection."""

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from tests.contract.stranger.client import ErrorDetails, read_error, request_of
from tests.contract.stranger.executor import ExecutorConfig, StrangerExecutor
from tests.contract.stranger.process import (
    Driver,
    Scheduler,
    poll,
    running_cluster,
    running_scheduler,
)
from tests.contract.stranger.truth import expected_tokens
from tests.support.processes.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVICES = ("", "splitserve.scheduler.v1.SchedulerService")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Driver]:
    async with running_cluster(StrangerExecutor()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def empty() -> AsyncIterator[Scheduler]:
    """A scheduler without executors."""
    async with running_scheduler() as scheduler:
        yield scheduler


def info_of(executor: StrangerExecutor, path: str, value: object) -> executor_pb2.ExecutorInfo:
    """A copy of what `executor` announces, with one field changed."""
    info = executor_pb2.ExecutorInfo()
    info.CopyFrom(executor.info)
    info.address = "127.0.0.1:1"
    *parents, name = path.split(".")
    message: object = info
    for parent in parents:
        message = getattr(message, parent)
    setattr(message, name, value)
    return info


async def register(address: str, info: executor_pb2.ExecutorInfo) -> ErrorDetails | None:
    """How the registration of `info` is refused; None if it is not."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        try:
            await stub.Register(registry_pb2.RegisterRequest(executor=info), timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            return read_error(error)
    return None


def check(error: ErrorDetails | None, code: str, reason: str, *named: str) -> None:
    assert error is not None, "accepted"
    assert (error.code.name, error.reason, error.domain) == (code, reason, "splitserve")
    assert all(each in error.message for each in named), error.message


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("contract_version.major", 2, "CONTRACT_VERSION_MISMATCH"),
        ("sampling_version", 3, "CONTRACT_VERSION_MISMATCH"),
        ("model.digest", "cd" * 32, "MODEL_MISMATCH"),
        ("model.dtype", "bfloat16", "MODEL_MISMATCH"),
        ("model.kv_cache_dtype", "float8_e4m3fn", "MODEL_MISMATCH"),
    ],
)
async def test_register_refuses_when_executor_does_not_match(
    cluster: Driver, path: str, value: object, reason: str
) -> None:
    error = await register(cluster.scheduler.address, info_of(cluster.executors[0], path, value))
    named = path.removesuffix(".major").rpartition(".")[2]
    check(error, "FAILED_PRECONDITION", reason, named, str(value))


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("executor_epoch", [0]),
        ("sampling_version", [0]),
        ("address", ["", "no port", "169.254.169.254:80", "192.0.2.1:50052"]),
        ("model.name", [""]),
        ("model.kv_cache_dtype", ["", "float8"]),
        ("model.quantization", ["x" * 65]),
        ("model.dtype", ["int7"]),
        ("model.digest", ["XYZ"]),
        ("model.vocab_size", [0]),
        ("model.max_model_len_tokens", [0]),
        ("block_size_tokens", [0]),
        ("num_device_blocks", [0]),
        ("num_host_blocks", [-1]),
        ("limits.max_num_rows", [0]),
        ("limits.max_num_batched_tokens", [0]),
        ("limits.max_message_bytes", [0]),
        ("limits.max_inflight_steps", [0]),
    ],
)
async def test_register_refuses_when_field_is_missing_or_out_of_range(
    cluster: Driver, empty: Scheduler, path: str, values: list[object]
) -> None:
    for value in values:
        error = await register(empty.address, info_of(cluster.executors[0], path, value))
        check(error, "INVALID_ARGUMENT", "EXECUTOR_INFO_INVALID", path.rpartition(".")[2])


async def test_register_accepts_when_keys_and_values_have_8_bits(cluster: Driver) -> None:
    info = info_of(cluster.executors[0], "model.kv_cache_dtype", "float8_e4m3fn")
    async with running_scheduler() as scheduler:
        assert await register(scheduler.address, info) is None


@pytest.mark.parametrize("is_another", [False, True])
async def test_executor_goes_on_when_its_address_is_registered_again(
    cluster: Driver, is_another: bool
) -> None:
    (executor,) = cluster.executors
    info = executor_pb2.ExecutorInfo()
    info.CopyFrom(executor.info)
    info.executor_epoch += is_another
    generation = cluster.client.start(request_of([1, 2], temperature=0, max_tokens=150))
    await generation.read_until(3)
    error = await register(cluster.scheduler.address, info)
    if is_another:
        named = str(info.executor_epoch)
        check(error, "FAILED_PRECONDITION", "EXECUTOR_MISMATCH", named)
    else:
        assert error is None
    completion = await generation.finish()
    assert completion.tokens == expected_tokens([1, 2], 0, 0, 150)
    assert completion.finish is not None
    assert completion.finish.usage.num_preemptions == 0
    assert [state.executor for state in await cluster.states()] == [executor.info]


async def test_dead_address_changes_nothing_when_it_is_registered(cluster: Driver) -> None:
    dead = info_of(cluster.executors[0], "model.digest", "cd" * 32)
    dead.model.max_model_len_tokens = 3
    executor = StrangerExecutor()
    async with running_scheduler() as scheduler:
        assert await register(scheduler.address, dead) is None
        try:
            await executor.start(scheduler.address)
            await executor.wait_for_stream()
        finally:
            await executor.stop()


async def test_health_follows_executor_when_it_comes_and_goes() -> None:
    executor = StrangerExecutor()
    async with (
        running_scheduler(reconnect_timeout_s=0.1) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def wait_for(status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
            async def ask() -> tuple[bool, list[object]]:
                answers = [
                    await stub.Check(
                        health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S
                    )
                    for name in SERVICES
                ]
                return all(answer.status == status for answer in answers), list(answers)

            await poll(ask)

        await wait_for(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            await executor.start(scheduler.address)
            await wait_for(health_pb2.HealthCheckResponse.SERVING)
        finally:
            await executor.stop()
        await wait_for(health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_reflection_lists_services(empty: Scheduler) -> None:
    async with grpc.aio.insecure_channel(empty.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE_S
        )
        response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    area = "splitserve.scheduler.v1."
    assert {f"{area}{name}Service" for name in ("Scheduler", "Registry", "Admin")} <= names
    assert "grpc.health.v1.Health" in names


@pytest.mark.parametrize(
    "older",
    [
        ExecutorConfig(contract_minor=1),
        ExecutorConfig(contract_minor=5, sampling_version=1),
    ],
)
async def test_seeded_request_stays_among_executors_of_one_sampling_arithmetic(
    older: ExecutorConfig,
) -> None:
    old, new = StrangerExecutor(older), StrangerExecutor()
    async with running_cluster(old, new) as fleet:
        plain = [request_of([5, number], seed=number, max_tokens=4) for number in range(6)]
        both = [
            request_of([5, number], seed=number, max_tokens=4, min_p=0.1, top_p=0.5)
            for number in range(6)
        ]

        await fleet.client.generate_all(both)

        assert not old.batches
        assert new.batches
        await fleet.client.generate_all(plain)
        assert old.batches, "a request that any arithmetic answers alike goes anywhere"
