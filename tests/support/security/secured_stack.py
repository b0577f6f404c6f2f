"""Scheduler, executor and gateway as an operator sets them up where others can reach them."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import httpx2

from splitserve_client import ClientConfig
from splitserve_keys import ApiKey
from splitserve_options import BUNDLED_MODEL
from splitserve_rpc import Role, channel_options
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import Processes, processes, wait_ready
from tests.support.security.cluster import Certificates
from tests.support.security.credentials import KeyFile, bearer

# Keys by the name of who has them: tenant, scope.
_KEYS = {
    "tenant a": ("a", "generate"),
    "tenant b": ("b", "generate"),
    "late": ("a", "generate"),
    "gateway": ("gateways", "gateway"),
    "operator": ("operators", "operator"),
}
# Who has a certificate of the cluster, and what it is called.
_CERTIFICATES = {"an executor": "executor", "an operator": "operator", "a scheduler": "scheduler"}

CALLERS = ("anonymous", "a guess", *_KEYS, *_CERTIFICATES)


@dataclass(frozen=True, slots=True)
class SecuredStack:
    """Addresses of a secured stack, and the credentials of its callers."""

    certificates: Certificates
    keys: dict[str, str]
    folder: Path
    processes: Processes
    clients: str
    cluster: str
    executor: str
    http: str

    def channel(self, caller: str, address: str) -> grpc.aio.Channel:
        """Channel of `caller`, with its certificate of the cluster if it has one."""
        role = {self.clients: None, self.cluster: Role.SCHEDULER, self.executor: Role.EXECUTOR}
        named = role[address]
        options: list[tuple[str, int | str]] = [*channel_options()]
        if named is not None:
            options.append(("grpc.ssl_target_name_override", named.dns_name))
        credentials = self.certificates.client(_CERTIFICATES.get(caller))
        return grpc.aio.secure_channel(address, credentials, options)

    def metadata(self, caller: str) -> tuple[tuple[str, str], ...]:
        """gRPC metadata of `caller`."""
        return bearer(self.key(caller))

    def headers(self, caller: str) -> dict[str, str]:
        """HTTP headers of `caller`."""
        return dict(self.metadata(caller))

    def key(self, caller: str) -> str | None:
        """The credential of `caller`."""
        return ApiKey.draw().text if caller == "a guess" else self.keys.get(caller)

    def client(self, caller: str) -> ClientConfig:
        """Client configuration of `caller`, for the address of clients."""
        credentials = self.certificates.client()
        return replace(PATIENT, credentials=credentials, api_key=self.key(caller))

    def browser(self) -> httpx2.AsyncClient:
        """Speaks HTTPS with the gateway, as anybody can."""
        context = ssl.create_default_context(cafile=str(self.certificates.directory / "ca.crt"))
        base_url = f"https://{self.http}"
        return httpx2.AsyncClient(
            base_url=base_url, trust_env=False, verify=context, timeout=PATIENCE_S
        )


@asynccontextmanager
async def secured_stack(folder: Path) -> AsyncIterator[SecuredStack]:
    """Everything with TLS and keys; logs and the audit log are in `folder`."""
    certificates, file = Certificates.make(folder / "certificates"), KeyFile(folder)
    keys = _make_keys(file)
    own = folder / "gateway.key"
    own.write_text(keys["gateway"])
    cluster, http = reserve_address(), reserve_address()
    ca = certificates.directory / "ca.crt"
    with processes(Path(BUNDLED_MODEL), folder / "log") as running:
        running.start_scheduler(
            *(f"--cluster-listen={cluster}", *certificates.flags("scheduler")),
            *(f"--api-keys={file.path}", f"--audit-log={folder / 'audit'}"),
            *("--log-level=debug", "--queue-policy=fair"),
        )
        executor = running.start_executor(
            f"--scheduler={cluster}", *certificates.flags("executor"), "--log-level=debug"
        )
        files = certificates.files("gateway")
        running.start_gateway(
            *(f"--http={http}", f"--http-tls-cert={files.cert}", f"--http-tls-key={files.key}"),
            *(f"--tls-ca={ca}", f"--gateway-key-file={own}", "--log-level=debug"),
        )
        operator = replace(PATIENT, credentials=certificates.client("operator"))
        await running.wait_until(lambda executors: len(executors) == 1, cluster, operator)
        stack = SecuredStack(
            certificates, keys, folder, running, running.address, cluster, executor, http
        )
        async with stack.browser() as browser:
            await wait_ready(browser)
        yield stack


def _make_keys(file: KeyFile) -> dict[str, str]:
    """The keys by who has them; that of `late` has expired."""
    keys = {
        caller: file.add(tenant, f"--scope={scope}") for caller, (tenant, scope) in _KEYS.items()
    }
    file.expire(keys["late"])
    return keys
