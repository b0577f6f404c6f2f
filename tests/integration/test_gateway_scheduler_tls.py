"""TLS between gateway and scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from splitserve_client import CredentialsUnusable
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.server import Server
from splitserve_rpc import Access, ServerSecurity, Tls, TlsFiles
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_scheduler import FakeScheduler, start
from tests.support.processes.gateway import serving, until, url_of
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.cluster import Certificates


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path)


async def readiness(config: GatewayConfig, wanted: int, num_looks: int | None = None) -> list[int]:
    """What `/health/ready` says until it says `wanted`, or for so many looks."""
    statuses: list[int] = []
    async with (
        serving(config) as server,
        httpx2.AsyncClient(base_url=url_of(server), trust_env=False) as http,
    ):

        async def look() -> tuple[bool, object]:
            statuses.append((await http.get("/health/ready")).status_code)
            is_over = statuses[-1] == wanted or len(statuses) == num_looks
            return is_over, statuses[-1]

        await poll(look, PATIENCE_S)
    return statuses


async def test_scheduler_is_reached_with_mutual_trust_alone(
    certificates: Certificates, tmp_path: Path
) -> None:
    others = Certificates.make(tmp_path / "others").files("gateway")
    files = certificates.files("gateway")
    security = ServerSecurity(Access(), Tls(certificates.files("scheduler")))
    running = await start(FakeScheduler(), security=security)
    address = f"127.0.0.1:{running.port}"
    try:
        for tls, wanted in (
            (files, 200),
            # None of its own; one of others; none that it believes; plain text.
            (TlsFiles(ca=files.ca), 503),
            (TlsFiles(others.cert, others.key, files.ca), 503),
            (TlsFiles(files.cert, files.key, others.ca), 503),
            (None, 503),
        ):
            config = GatewayConfig(schedulers=address, scheduler_tls=tls)
            if wanted == 200:
                assert (await readiness(config, wanted))[-1] == 200
            else:
                assert set(await readiness(config, 200, num_looks=20)) == {503}
    finally:
        await running.server.stop(None)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith("upstream_unreachable ")]


async def test_gateway_says_why_when_it_never_reaches_its_scheduler(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = Certificates.make(tmp_path / "others").files("gateway")
    security = ServerSecurity(Access(), Tls(certificates.files("scheduler")))
    running = await start(FakeScheduler(), security=security)
    address = f"127.0.0.1:{running.port}"

    try:
        for tls, how, why in (
            (others, "with TLS", "certificate signature failure"),
            (None, "in plain text", "Socket closed"),
        ):
            caplog.clear()
            async with serving(GatewayConfig(schedulers=address, scheduler_tls=tls)):
                await until(lambda: bool(told(caplog)))
            (line,) = told(caplog)
            assert line.startswith(f"upstream_unreachable address={address} error='cannot connect")
            assert how in line
            assert why in line
    finally:
        await running.server.stop(None)


async def test_gateway_logs_a_problem_once_when_it_retries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_connections = 0

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.close()

    listener = await asyncio.start_server(close, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    async with listener, serving(GatewayConfig(schedulers=f"{host}:{port}")):
        await until(lambda: num_connections > 8 and bool(told(caplog)))
    assert len(told(caplog)) == len(set(told(caplog)))


@pytest.mark.parametrize("wrong", ["gateway.crt", "gateway.key", "ca.crt"])
def test_gateway_does_not_start_when_its_files_are_unusable(
    certificates: Certificates, wrong: str
) -> None:
    (certificates.directory / wrong).write_text("nothing of the kind")
    config = GatewayConfig(scheduler_tls=certificates.files("gateway"))
    with pytest.raises(CredentialsUnusable, match=wrong):
        Server(config, "127.0.0.1:0")


@pytest.mark.parametrize("content", ["", "two words", None])
def test_gateway_does_not_start_when_its_key_file_is_unusable(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "key.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CredentialsUnusable, match=r"key\.txt"):
        Server(GatewayConfig(gateway_key_file=path), "127.0.0.1:0")
