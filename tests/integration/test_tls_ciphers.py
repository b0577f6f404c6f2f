"""Ciphers of TLS 1.2 that each listener takes: with forward secrecy, and none of CBC."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from splitserve_gateway.config import GatewayConfig
from splitserve_metrics.instruments import Page
from splitserve_metrics.listener import MetricsAddress, MetricsListener
from splitserve_rpc.access import Access
from splitserve_rpc.server import ServerSecurity, bind_server
from splitserve_rpc.tls import Tls
from tests.support.processes.gateway import serving
from tests.support.security.cluster import Certificates

# Our certificates are of elliptic curves; the others are for those of RSA.
SAFE = {"ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"}
MORE = {"ECDHE-ECDSA-CHACHA20-POLY1305"}


def ciphers_taken(port: int, ca: Path) -> set[str]:
    """Of all that OpenSSL knows, those with which a handshake succeeds."""
    every = ssl.create_default_context()
    every.set_ciphers("ALL:!PSK:!SRP:!aNULL:@SECLEVEL=0")
    names = {each["name"] for each in every.get_ciphers() if each["protocol"] != "TLSv1.3"}
    assert "ECDHE-ECDSA-AES128-SHA" in names, "OpenSSL knows no cipher of CBC: nothing is tested"
    return {name for name in names if is_taken(port, ca, name)}


def is_taken(port: int, ca: Path, cipher: str) -> bool:
    context = ssl.create_default_context(cafile=ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(f"{cipher}:@SECLEVEL=0")
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection(("127.0.0.1", port)) as connection,
            context.wrap_socket(connection, server_hostname="localhost"),
        ):
            return True
    except (ssl.SSLError, ConnectionError):
        return False


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path)


async def test_gateway_takes_no_cipher_of_cbc(certificates: Certificates) -> None:
    async with serving(GatewayConfig(http_tls=certificates.files("gateway", ca=False))) as server:
        ca = certificates.directory / "ca.crt"
        assert await asyncio.to_thread(ciphers_taken, server.config.port, ca) == SAFE | MORE


async def test_metrics_take_no_cipher_of_tls_1_2(certificates: Certificates) -> None:
    """Their readers need certificates, and so TLS 1.3."""
    address = MetricsAddress("127.0.0.1:0", certificates.files("scheduler"))
    listener = MetricsListener(address, lambda: Page(CollectorRegistry(), []))
    port = int((await listener.start()).rpartition(":")[2])
    ca = certificates.directory / "ca.crt"
    assert await asyncio.to_thread(ciphers_taken, port, ca) == set()
    await listener.close()


async def test_grpc_takes_no_cipher_of_cbc(certificates: Certificates) -> None:
    tls = Tls(certificates.files("scheduler", ca=False))
    running = bind_server("127.0.0.1:0", (), security=ServerSecurity(Access(), tls))
    await running.server.start()
    ca = certificates.directory / "ca.crt"
    taken = await asyncio.to_thread(ciphers_taken, running.port, ca)
    assert SAFE <= taken <= SAFE | MORE
    await running.stop(0)
