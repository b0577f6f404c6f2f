"""What `grpc.aio` is to who is called: a server with our own interceptor, over the network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from splitserve_rpc import MAX_MESSAGE_BYTES, Access, BoundaryInterceptor
from tests.simulation.calls import Window
from tests.simulation.network import End, Frame, Network
from tests.simulation.virtual_loop import current_process


class Server:
    """Listens for the present process. Its handlers are those that generated code registers."""

    def __init__(self, network: Network, address: str) -> None:
        self.address = address
        self._network = network
        self._process = current_process()
        self._boundary = BoundaryInterceptor(lambda: MAX_MESSAGE_BYTES, Access())
        self._handlers: dict[str, Any] = {}
        self._connections: dict[End, dict[int, ServerCall]] = {}
        self._number = 0

    def add_generic_rpc_handlers(self, handlers: Iterable[object]) -> None:
        """They are registered by name, too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def start(self) -> None:
        """Takes connections from now on."""
        self._network.listen(self.address, self._accept, self._process)

    @property
    def num_calls(self) -> int:
        """Calls that are open."""
        return sum(map(len, self._connections.values()))

    async def stop(self, grace_s: float) -> None:
        """Takes nobody any more, lets calls end for `grace_s`, then cancels them."""
        self._network.stop_listening(self.address, self._process)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        while self.num_calls and loop.time() < until_s:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(0.05)
        for calls in self._connections.values():
            for call in list(calls.values()):
                call.cancel()
        for end in list(self._connections):
            end.close()
        self._connections.clear()

    def _accept(self, end: End) -> None:
        calls: dict[int, ServerCall] = {}
        self._connections[end] = calls
        self._number += 1
        peer = f"ipv4:{end.peer.process.host}:{40000 + self._number}"

        def receive(frame: Frame) -> None:
            if frame[0] == "open":
                calls[frame[1]] = call = ServerCall(end, peer, frame)
                call.start(self._boundary, self._handlers, lambda: calls.pop(frame[1], None))
            elif (open_call := calls.get(frame[1])) is not None:
                open_call.receive(frame)

        def lose(_problem: str) -> None:
            self._connections.pop(end, None)
            for call in list(calls.values()):
                call.cancel()

        end.on_frame, end.on_lost = receive, lose
        end.send(("settings",))


class ServerCall:
    """One call that came in; it is the context of its handler, too."""

    def __init__(self, end: End, peer: str, opening: Frame) -> None:
        _, self._number, self._method, self._metadata = opening
        self._end = end
        self._peer = peer
        self._inbox: deque[bytes] = deque()
        self._has_all = False
        self._changed = asyncio.Event()
        self._window = Window()
        self._task: asyncio.Task[None] | None = None
        self._serialize: Any = None
        self._status: tuple[Any, str, Any] = (grpc.StatusCode.OK, "", ())

    def start(self, boundary: BoundaryInterceptor, handlers: Mapping[str, Any], over: Any) -> None:  # noqa: ANN401
        """Runs its handler; `over` is called when that has ended."""
        name = f"ServerCall {self._method}"
        self._task = asyncio.get_running_loop().create_task(
            self._run(boundary, handlers), name=name
        )
        self._task.add_done_callback(lambda _task: over())

    def receive(self, frame: Frame) -> None:
        """Something that the caller says."""
        match frame:
            case ("message", _, bytes() as data):
                self._inbox.append(data)
            case ("half_close", _):
                self._has_all = True
            case ("credit", _, int() as num_bytes):
                self._window.give_back(num_bytes)
            case ("cancel", _):
                self.cancel()
        self._wake()

    def cancel(self) -> None:
        """The call is over, whatever the handler is at."""
        self._has_all = True
        self._wake()
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()

    async def _run(self, boundary: BoundaryInterceptor, handlers: Mapping[str, Any]) -> None:
        details = _Details(self._method, self._metadata)

        async def continuation(_details: object) -> Any:  # noqa: ANN401
            return handlers.get(self._method)

        handler = await boundary.intercept_service(continuation, details)
        self._serialize = handler.response_serializer
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
        request: Any = self._requests() if handler.request_streaming else await self._next()
        if request is None:
            return
        try:
            response = await behaviour(request, self)
            if not handler.response_streaming:
                await self.write(response)
        except grpc.aio.AbortError:
            pass
        self._end.send(("status", self._number, *self._status))
        self._has_all = True
        self._wake()

    async def _requests(self) -> AsyncIterator[bytes]:
        while (data := await self._next()) is not None:
            yield data

    async def _next(self) -> bytes | None:
        """The next message; None if there are no more, as a call that was cancelled has none."""
        while not self._inbox:
            if self._has_all:
                return None
            await self._changed.wait()
        data = self._inbox.popleft()
        self._end.send(("credit", self._number, len(data)))
        return data

    # -- as `grpc.aio.ServicerContext` has it ----------------------------------------------------

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> Any:  # noqa: ANN401
        return self._metadata

    def auth_context(self) -> dict[str, Any]:
        return {}

    async def write(self, message: Any) -> None:  # noqa: ANN401
        data = self._serialize(message)
        await self._window.wait()
        self._window.take(len(data))
        self._end.send(("message", self._number, data))

    async def abort_with_status(self, status: Any) -> NoReturn:  # noqa: ANN401
        self._status = (status.code, status.details, tuple(status.trailing_metadata or ()))
        raise grpc.aio.AbortError


class _Details:
    """As `grpc.HandlerCallDetails`."""

    def __init__(self, method: str, metadata: Any) -> None:  # noqa: ANN401
        self.method = method
        self.invocation_metadata = metadata
