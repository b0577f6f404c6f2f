"""What `grpc.aio` is to who calls: channels and calls, over the simulated network.

`open_channel` stands for `grpc.aio.insecure_channel`. Only what our own code uses is here, with
what the library does when connections break: errors with a status, back-off between attempts, and
windows that keep who writes from writing more than is read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio

from tests.simulation.network import End, Frame, Network
from tests.simulation.virtual_loop import current_process

# What may be sent and not read, of one call.
WINDOW_BYTES = 64 * 1024
_FIRST_BACKOFF_S = 1.0
_MOST_BACKOFF_S = 120.0
_BACKOFF_FACTOR = 1.6

State: TypeAlias = grpc.ChannelConnectivity


class Window:
    """How much more may be written; `wait` returns when there is room."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    def take(self, num_bytes: int) -> None:
        """So much is under way."""
        self._num_bytes += num_bytes
        if self._num_bytes > WINDOW_BYTES:
            self._room.clear()

    def give_back(self, num_bytes: int) -> None:
        """So much was read."""
        self._num_bytes -= num_bytes
        if self._num_bytes <= WINDOW_BYTES:
            self._room.set()

    def open(self) -> None:
        """Nobody is to wait any more."""
        self._num_bytes = -(2**62)
        self._room.set()

    async def wait(self) -> None:
        """Returns when there is room."""
        await self._room.wait()


class Channel:
    """A channel to one address: one connection at a time, made when it is needed."""

    def __init__(self, network: Network, address: str, options: Iterable[tuple[str, Any]]) -> None:
        self._network = network
        self._process = current_process()
        self._address = address.removeprefix("dns:///")
        given = dict(options)
        first_ms = given.get("grpc.initial_reconnect_backoff_ms", _FIRST_BACKOFF_S * 1000)
        most_ms = given.get("grpc.max_reconnect_backoff_ms", _MOST_BACKOFF_S * 1000)
        self._first_backoff_s, self._most_backoff_s = first_ms / 1000, most_ms / 1000
        self._backoff_s = self._first_backoff_s
        self._state = State.IDLE
        self._changed = asyncio.Event()
        self._problem = ""
        self._end: End | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}

    # -- as `grpc.aio.Channel` has it ------------------------------------------------------------

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._become(State.SHUTDOWN)
        end, self._end = self._end, None
        for call in list(self._calls.values()):
            call.cancel()
        if end is not None:
            end.close()

    def get_state(self, try_to_connect: bool = False) -> State:
        if try_to_connect and self._state is State.IDLE:
            self._connect()
        return self._state

    async def wait_for_state_change(self, last_observed_state: State) -> None:
        while self._state is last_observed_state:
            await self._changed.wait()

    def unary_unary(self, path: str, *codecs: Any, **options: Any) -> Any:  # noqa: ANN401
        return partial(self._call, path, _codecs(codecs, options), is_unary=True)

    def unary_stream(self, path: str, *codecs: Any, **options: Any) -> Any:  # noqa: ANN401
        return partial(self._call, path, _codecs(codecs, options), is_unary=True)

    def stream_stream(self, path: str, *codecs: Any, **options: Any) -> Any:  # noqa: ANN401
        return partial(self._call, path, _codecs(codecs, options), is_unary=False)

    def _call(
        self,
        path: str,
        codecs: tuple[Any, Any],
        request: Any = None,  # noqa: ANN401
        *,
        is_unary: bool,
        timeout: float | None = None,
        metadata: Iterable[tuple[str, str]] | None = None,
        **_options: object,
    ) -> Call:
        call = Call(self, next(self._numbers), path, codecs)
        self._calls[call.number] = call
        call.begin(request, is_unary, timeout, tuple(metadata or ()))
        return call

    # -- the connection --------------------------------------------------------------------------

    async def connected(self) -> End:
        """The connection. Raises grpc.aio.AioRpcError as soon as it is known that there is none."""
        while self._end is None:
            if self._state is State.SHUTDOWN:
                raise grpc.aio.UsageError("Channel is closed.")
            if self._state is State.TRANSIENT_FAILURE:
                raise rpc_error(grpc.StatusCode.UNAVAILABLE, self._problem)
            self._connect()
            await self._changed.wait()
        return self._end

    def forget(self, call: Call) -> None:
        """The call is over."""
        self._calls.pop(call.number, None)

    def _connect(self) -> None:
        if self._state is State.IDLE:
            self._become(State.CONNECTING)
            self._network.connect(self._process, self._address, self._answered)

    def _answered(self, answer: End | str) -> None:
        if self._state is not State.CONNECTING:
            if isinstance(answer, End):
                answer.close()
        elif isinstance(answer, End):
            self._end, self._backoff_s = answer, self._first_backoff_s
            answer.on_frame, answer.on_lost = self._receive, partial(self._lose, answer)
            self._become(State.READY)
        else:
            self._problem = f"failed to connect to all addresses; last error: UNKNOWN: {answer}"
            self._become(State.TRANSIENT_FAILURE)
            pause_s = self._backoff_s * (0.8 + 0.4 * self._network.random.random())
            self._backoff_s = min(self._backoff_s * _BACKOFF_FACTOR, self._most_backoff_s)
            asyncio.get_running_loop().call_later(pause_s, self._try_again)

    def _try_again(self) -> None:
        # gRPC goes on by itself.
        if self._state is State.TRANSIENT_FAILURE:
            self._state = State.IDLE
            self._connect()

    def _receive(self, frame: Frame) -> None:
        call = self._calls.get(frame[1])
        if call is not None:
            call.receive(frame)

    def _lose(self, end: End, problem: str) -> None:
        if self._end is end:
            self._end = None
            self._become(State.IDLE)
            for call in list(self._calls.values()):
                call.lose(problem)

    def _become(self, state: State) -> None:
        if self._state is not State.SHUTDOWN:
            self._state = state
        self._changed.set()
        self._changed.clear()


class Call:
    """One call, of any kind. `await` it for the one response, iterate or `read` it for many."""

    def __init__(self, channel: Channel, number: int, path: str, codecs: tuple[Any, Any]) -> None:
        self.number = number
        self._channel = channel
        self._path = path
        self._serialize, self._deserialize = codecs
        self._end: End | None = None
        self._inbox: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._window = Window()
        # How it ended: None for well, or what is raised.
        self._has_ended = False
        self._error: BaseException | None = None
        self._opening: asyncio.Task[End] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def begin(
        self,
        request: Any,  # noqa: ANN401
        has_one_request: bool,
        timeout_s: float | None,
        metadata: Any,  # noqa: ANN401
    ) -> None:
        """Sends what is known."""
        loop = asyncio.get_running_loop()
        if timeout_s is not None:
            self._deadline = loop.call_later(timeout_s, self._time_out)
        self._opening = loop.create_task(self._open(metadata))
        if has_one_request:
            self._writing = loop.create_task(self._write_one(request))
        elif request is not None:
            self._writing = loop.create_task(self._write_all(request))

    # -- as the calls of `grpc.aio` have it ------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Any]:
        return self._one().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._all()

    async def read(self) -> Any:  # noqa: ANN401
        try:
            while not self._inbox and not self._has_ended:
                await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()  # as the library does
            raise
        if self._inbox:
            data = self._inbox.popleft()
            if self._end is not None:
                self._end.send(("credit", self.number, len(data)))
            return self._deserialize(data)
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF

    async def write(self, message: Any) -> None:  # noqa: ANN401
        data = self._serialize(message)
        end = await self._opened()
        await self._window.wait()
        if self._has_ended:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._window.take(len(data))
        end.send(("message", self.number, data))

    async def done_writing(self) -> None:
        (await self._opened()).send(("half_close", self.number))

    def cancel(self) -> bool:
        if self._has_ended:
            return False
        if self._end is not None:
            self._end.send(("cancel", self.number))
        self._finish(asyncio.CancelledError())
        return True

    def done(self) -> bool:
        return self._has_ended

    # -- what comes ------------------------------------------------------------------------------

    def receive(self, frame: Frame) -> None:
        """Something about this call."""
        match frame:
            case ("message", _, bytes() as data):
                self._inbox.append(data)
                self._wake()
            case ("credit", _, int() as num_bytes):
                self._window.give_back(num_bytes)
            case ("status", _, code, details, metadata):
                is_ok = code is grpc.StatusCode.OK
                self._finish(None if is_ok else rpc_error(code, details, metadata))

    def lose(self, problem: str) -> None:
        """Its connection is gone."""
        self._finish(rpc_error(grpc.StatusCode.UNAVAILABLE, problem))

    def _time_out(self) -> None:
        if not self._has_ended:
            if self._end is not None:
                self._end.send(("cancel", self.number))
            self._finish(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _finish(self, error: BaseException | None) -> None:
        if self._has_ended:
            return
        self._has_ended, self._error = True, error
        self._channel.forget(self)
        self._window.open()
        if self._deadline is not None:
            self._deadline.cancel()
        for task in (self._opening, self._writing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()

    # -- its course ------------------------------------------------------------------------------

    async def _open(self, metadata: Any) -> End:  # noqa: ANN401
        try:
            end = await self._channel.connected()
        except grpc.aio.AioRpcError as error:
            self._finish(error)
            raise asyncio.CancelledError from error
        self._end = end
        end.send(("open", self.number, self._path, metadata))
        return end

    async def _opened(self) -> End:
        """Raises what has ended it before it began."""
        assert self._opening is not None
        await asyncio.wait([self._opening])
        if self._opening.cancelled() or self._has_ended:
            if isinstance(self._error, grpc.aio.AioRpcError):
                raise self._error
            raise asyncio.InvalidStateError("RPC already finished.")
        return self._opening.result()

    async def _write_one(self, request: Any) -> None:  # noqa: ANN401
        try:
            await self.write(request)
            await self.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # who reads is told

    async def _write_all(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                await self.write(request)
            await self.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass

    async def _one(self) -> Any:  # noqa: ANN401
        response = await self.read()
        if response is not grpc.aio.EOF and await self.read() is not grpc.aio.EOF:
            raise AssertionError("one response was announced")
        return response

    async def _all(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response


def _codecs(codecs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    serialize = codecs[0] if codecs else options.get("request_serializer")
    deserialize = codecs[1] if len(codecs) > 1 else options.get("response_deserializer")
    return serialize or (lambda data: data), deserialize or (lambda data: data)


def rpc_error(
    code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, Any]] = ()
) -> grpc.aio.AioRpcError:
    """What a call raises."""
    trailing = grpc.aio.Metadata(*metadata)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


def opener(network: Network) -> Callable[..., Channel]:
    """What stands for `grpc.aio.insecure_channel`."""

    def open_channel(
        target: str, options: Iterable[tuple[str, Any]] | None = None, **_rest: object
    ) -> Channel:
        return Channel(network, target, options or ())

    return open_channel
