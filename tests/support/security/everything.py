"""A server that has every method of all our protos, and what callers of it are told."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from splitserve_rpc.errors import failure_of
from splitserve_rpc.server import RunningServer, ServerSecurity, bind_server
from tests.support.processes.patience import PATIENCE_S

_PROTOS = Path(__file__).parents[3] / "protos"


def all_services() -> list[ServiceDescriptor]:
    """Those of our protos."""
    paths = [path.relative_to(_PROTOS) for path in _PROTOS.glob("splitserve/**/*_pb2.py")]
    modules = [import_module(".".join(path.with_suffix("").parts)) for path in paths]
    return [s for module in modules for s in module.DESCRIPTOR.services_by_name.values()]


METHODS = [f"/{service.full_name}/{m.name}" for service in all_services() for m in service.methods]


class _Everything(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Has all methods, also those that nobody wrote."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return b"answered"

        return grpc.unary_unary_rpc_method_handler(answer, bytes, bytes)


async def serve_everything(security: ServerSecurity) -> RunningServer:
    """A server on loopback; whoever asks for it stops it."""
    running = bind_server("127.0.0.1:0", (), security=security)
    running.server.add_generic_rpc_handlers((_Everything(),))
    await running.server.start()
    return running


async def outcome(channel: grpc.aio.Channel, method: str, **arguments: object) -> str:
    """What was answered, or the reason or the status of the refusal."""
    try:
        answer: bytes = await channel.unary_unary(method)(b"", timeout=PATIENCE_S, **arguments)
    except grpc.aio.AioRpcError as error:
        return failure_of(error).reason or error.code().name
    return answer.decode()
