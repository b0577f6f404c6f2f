"""A scheduler and an executor that prove to each other who they are, as processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from splitserve.executor.v1 import executor_pb2
from splitserve_client import (
    AsyncClient,
    SamplingParams,
    ServerUnreachable,
    SplitserveError,
)
from splitserve_rpc.access import Role
from splitserve_rpc.server import channel_options
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes, processes
from tests.support.security.cluster import Certificates
from tests.support.security.sent_batch import refusal_of_batch

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def running(
    certificates: Certificates, tmp_path: Path
) -> AsyncIterator[tuple[Processes, str]]:
    """The processes, and the scheduler's address for its cluster."""
    cluster = reserve_address()
    with processes(make_tiny_model("llama", tmp_path, seed=2)) as running:
        flags = certificates.flags("scheduler")
        running.start_scheduler(f"--cluster-listen={cluster}", *flags)
        running.start_executor(f"--scheduler={cluster}", *certificates.flags("executor"))
        operator = replace(PATIENT, credentials=certificates.client("operator"))
        await running.wait_until(lambda executors: len(executors) == 1, cluster, operator)
        yield running, cluster


async def test_everything_is_encrypted_and_checked(
    running: tuple[Processes, str], certificates: Certificates
) -> None:
    served, cluster = running
    async with AsyncClient(
        served.address, replace(PATIENT, credentials=certificates.client())
    ) as client:
        assert len((await client.complete([5, 6, 7], PARAMS)).token_ids) == 8
        # What clients reach knows nothing of executors.
        with pytest.raises(SplitserveError) as refused:
            await client.list_executors()
    assert refused.value.reason == "METHOD_UNKNOWN"
    executor = replace(PATIENT, credentials=certificates.client("executor"))
    async with AsyncClient(cluster, executor) as client:
        with pytest.raises(SplitserveError) as refused:
            await client.list_executors()
    assert refused.value.reason == "CALLER_NOT_ALLOWED"
    (address,) = served.executors
    assert await batch_refused(certificates, "executor", address) == "CALLER_NOT_ALLOWED"
    # Only the batch itself is wrong here: an epoch far ahead.
    assert await batch_refused(certificates, "scheduler", address) == ""


async def test_clients_need_a_certificate_when_an_authority_is_given(
    certificates: Certificates, tmp_path: Path
) -> None:
    clients, cluster = Certificates.make(tmp_path, "--client", "alice"), reserve_address()
    ours = (certificates.directory / "ca.crt").read_bytes()
    key, cert = (clients.directory / f"alice.{end}" for end in ("key", "crt"))
    alice = grpc.ssl_channel_credentials(ours, key.read_bytes(), cert.read_bytes())
    with processes(tmp_path) as running:
        client_ca = f"--tls-client-ca={clients.directory / 'ca.crt'}"
        running.start_scheduler(
            f"--cluster-listen={cluster}", *certificates.flags("scheduler"), client_ca
        )
        operator = replace(PATIENT, credentials=certificates.client("operator"))
        await running.wait_until(lambda executors: not executors, cluster, operator)
        async with AsyncClient(running.address, replace(PATIENT, credentials=alice)) as client:
            assert not await client.is_serving()
        for stranger in (certificates.client(), certificates.client("executor")):
            async with AsyncClient(
                running.address, replace(PATIENT, credentials=stranger)
            ) as client:
                with pytest.raises(ServerUnreachable):
                    await client.is_serving()


async def batch_refused(certificates: Certificates, caller: str, address: str) -> str:
    """Why `caller`'s batch is refused, if the call is."""
    channel = certificates.identity(caller).channel(address, Role.EXECUTOR, channel_options())
    batch = executor_pb2.ScheduleBatch(scheduler_epoch=2**62, executor_epoch=1)
    async with channel:
        return await refusal_of_batch(channel, batch)
