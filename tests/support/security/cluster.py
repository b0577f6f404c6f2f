"""Certificates of a cluster, and servers and calls that are secured with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import grpc
import grpc.aio
import yaml  # type: ignore[import-untyped]
from google.protobuf.descriptor import ServiceDescriptor

from splitserve.executor.v1 import executor_pb2
from splitserve_cli.certs import main as make_certificates
from splitserve_rpc import (
    ClusterIdentity,
    RunningServer,
    ServerSecurity,
    Tls,
    TlsFiles,
    bind_server,
    failure_of,
)
from tests.support.processes.patience import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Certificates:
    """Directory of certificates."""

    directory: Path

    @classmethod
    def make(cls, directory: Path, *options: str) -> Certificates:
        """Makes or renews the certificates."""
        assert make_certificates([str(directory), *options]) == 0
        return cls(directory)

    def files(self, name: str, *, ca: bool = True) -> TlsFiles:
        """Files of `name`. `ca`: with the authority."""
        directory = self.directory
        authority = directory / "ca.crt" if ca else None
        return TlsFiles(directory / f"{name}.crt", directory / f"{name}.key", authority)

    def identity(self, name: str) -> ClusterIdentity:
        """Identity of a process of the cluster."""
        return ClusterIdentity(Tls(self.files(name)))

    def flags(self, name: str) -> list[str]:
        """The options of a process that is `name`."""
        files = self.files(name)
        return [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]

    def client(self, name: str | None = None) -> grpc.ChannelCredentials:
        """Credentials of a client with the certificate of `name`, or with none."""
        ca = (self.directory / "ca.crt").read_bytes()
        if name is None:
            return grpc.ssl_channel_credentials(ca)
        key = (self.directory / f"{name}.key").read_bytes()
        return grpc.ssl_channel_credentials(ca, key, (self.directory / f"{name}.crt").read_bytes())


ROOT = Path(__file__).resolve().parents[3]
COMPOSE_FOLDER = "/etc/splitserve"
SERVICES_WITH_TLS = yaml.safe_load((ROOT / "docker-compose.tls.yml").read_text())["services"]


def compose_environment(service: str, folder: Path | None = None) -> dict[str, str]:
    """The variables of a service. `folder`: where its files are instead."""
    entries = SERVICES_WITH_TLS[service]["environment"]
    if folder is not None:
        entries = [entry.replace(COMPOSE_FOLDER, str(folder)) for entry in entries]
    return dict(entry.split("=", 1) for entry in entries)


def run_compose_setup(folder: Path) -> None:
    """Runs the script of the service `setup`."""
    (script,) = SERVICES_WITH_TLS["setup"]["command"]
    assert SERVICES_WITH_TLS["setup"]["entrypoint"] == ["sh", "-euc"]
    script = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", script).replace(COMPOSE_FOLDER, str(folder))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-euc", script], check=True, env={**os.environ, "PATH": path})


_PROTOS = Path(__file__).parents[3] / "protos"


def all_services() -> list[ServiceDescriptor]:
    """All services of our protos."""
    paths = [path.relative_to(_PROTOS) for path in _PROTOS.glob("splitserve/**/*_pb2.py")]
    modules = [import_module(".".join(path.with_suffix("").parts)) for path in paths]
    return [s for module in modules for s in module.DESCRIPTOR.services_by_name.values()]


ALL_METHODS = [
    f"/{service.full_name}/{m.name}" for service in all_services() for m in service.methods
]


class _Everything(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handler of every method, known or not."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return b"answered"

        return grpc.unary_unary_rpc_method_handler(answer, bytes, bytes)


async def serve_everything(security: ServerSecurity) -> RunningServer:
    """Starts a server of all methods on loopback; the caller stops it."""
    running = bind_server("127.0.0.1:0", (), security=security)
    running.server.add_generic_rpc_handlers((_Everything(),))
    await running.server.start()
    return running


async def outcome_of_call(channel: grpc.aio.Channel, method: str, **arguments: object) -> str:
    """Answer of a call, or the reason or status of its refusal."""
    try:
        answer: bytes = await channel.unary_unary(method)(b"", timeout=PATIENCE_S, **arguments)
    except grpc.aio.AioRpcError as error:
        return failure_of(error).reason or error.code().name
    return answer.decode()


_EXECUTE = "/splitserve.executor.v1.ExecutorService/Execute"


async def refusal_of_batch(channel: grpc.aio.Channel, batch: executor_pb2.ScheduleBatch) -> str:
    """Reason or status of a refused call; empty if it is answered.

    The batch goes with the call: whoever writes to a stream that has ended already is told of that,
    and not why.
    """
    call = channel.unary_stream(_EXECUTE)(batch.SerializeToString(), timeout=PATIENCE_S)
    try:
        async for _ in call:
            break
    except grpc.aio.AioRpcError as error:
        return failure_of(error).reason or error.code().name
    return ""
