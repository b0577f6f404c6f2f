"""Tests processes that prove to each other who they are, and commands that call them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from splitserve_client import AsyncClient, ServerUnreachable
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import run_process
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import processes
from tests.support.security.cluster import Certificates
from tests.support.security.secured_stack import SecuredStack, secured_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredStack]:
    async with secured_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


def secret_file(path: Path, content: str) -> Path:
    path.write_text(f"{content}\n")
    path.chmod(0o600)
    return path


async def bench(stack: SecuredStack, *arguments: str) -> subprocess.CompletedProcess[str]:
    ca = stack.certificates.directory / "ca.crt"
    given = (f"--tls-ca={ca}", "--rate=50", "--requests=3", "--output-tokens=3", "--quiet")
    return await asyncio.to_thread(
        run_process, "splitserve_bench", *arguments, *given, "--prompt-tokens=20"
    )


async def test_bench_loads_secured_servers_with_the_key_of_each(
    stack: SecuredStack, tmp_path: Path
) -> None:
    keys = [secret_file(tmp_path / name, stack.keys[f"tenant {name}"]) for name in "ab"]
    report = tmp_path / "report.json"

    done = await bench(
        stack,
        f"a=grpc://{stack.clients}",
        f"b=https://{stack.http}/v1",
        *(f"--api-key-file={name}={key}" for name, key in zip("ab", keys, strict=True)),
        f"--json={report}",
    )
    refused = await bench(stack, f"https://{stack.http}/v1")

    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads(report.read_text())
    assert [each["requests"]["num_completed"] for each in content["targets"]] == [3, 3]
    said = done.stdout + report.read_text()
    assert not any(key in said for key in stack.keys.values())
    assert refused.returncode == 1
    assert refused.stderr.endswith("[http_401]\n")


async def info(*options: str) -> str:
    """Returns what `splitserve info` prints."""
    done = await asyncio.to_thread(run_process, "splitserve_cli", "info", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def operators(stack: SecuredStack) -> list[str]:
    events = [json.loads(line) for line in (stack.folder / "audit").read_text().splitlines()]
    return [event["caller"] for event in events if event["event"] == "operator_called"]


async def test_info_shows_the_model_to_keys_alone(stack: SecuredStack, tmp_path: Path) -> None:
    where = (f"--address={stack.clients}", f"--cluster-address={stack.cluster}")
    flags = (*where, *stack.certificates.flags("operator"))

    with_certificate = await info(*flags)
    assert with_certificate.startswith("model: not shown")
    assert stack.executor in with_certificate
    assert operators(stack)[-1] == "certificate:operator"

    with_key = await info(
        *flags, f"--api-key-file={secret_file(tmp_path / 'key', stack.keys['operator'])}"
    )
    assert with_key.startswith("model: ")
    assert "not shown" not in with_key
    assert stack.executor in with_key
    assert re.fullmatch(r"key:\w+, certificate:operator", operators(stack)[-1])


async def test_clients_need_a_certificate_of_their_authority(
    stack: SecuredStack, tmp_path: Path
) -> None:
    certificates = stack.certificates
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
