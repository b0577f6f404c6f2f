"""Link to one executor: the Execute call, renewed when it breaks as long as the executor lives."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import grpc
import grpc.aio

from scheduler_service.scheduler import LossCause
from scheduler_service.step_codec import EncodedBatch, is_part
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_common import check_file_name, printable
from splitserve_rpc import (
    NOBODY,
    SILENT_AFTER_S,
    ClusterIdentity,
    PeerState,
    PeerWatch,
    Role,
    channel_options,
    failure_of,
    is_answer,
)

_RETRY_PAUSE_S = 0.1
_MAX_FRUITLESS_CALLS = 10
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
MAX_TOKENIZER_FILES = 64
_MAX_SHOWN_CHARS = 80
# Reading and checking an adapter of gigabytes takes many seconds.
_LOAD_TIMEOUT_S = 600.0
_CLOSED = "the link is closed"
_SERVICE = executor.DESCRIPTOR.services_by_name["ExecutorService"]

_log = logging.getLogger(__name__)


class ExecutorLost(Exception):
    """The executor died, restarted, or does not answer."""

    cause = LossCause.DIED


class ExecutorSilent(ExecutorLost):
    """The executor does not answer: it may hang, or live and be out of reach."""

    cause = LossCause.SILENT


class ExecutorGone(ExecutorLost):
    """The executor's life is over: no process listens at its address, or another life does."""


class _ConnectionCut(Exception):
    """The executor lives, but messages over the connection in use do not reach it."""


class ExecutorRestarted(ExecutorGone):
    """Restart of the executor: another epoch answers at its address."""


class AdapterNotLoaded(Exception):
    """Error: the executor did not load an adapter. `is_final`: it cannot, rather than may later."""

    def __init__(self, why: str, *, is_final: bool) -> None:
        super().__init__(why)
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Time limits, address and callbacks of a link.

    `reconnect_timeout_s`: how long a broken Execute call may stay broken. `step_timeout_s`: limit
    of the call that streams tokenizer files. `target`: address to dial; None: the address of the
    executor's info, which may be a name. `on_cut` is called with True when the Execute call broke,
    with False when the executor is back. `on_look` is called twice a second with the state of the
    executor and the seconds since its last sign of life; it returns whether a silent executor is
    given up.
    """

    reconnect_timeout_s: float
    step_timeout_s: float
    target: str | None = None
    on_cut: Callable[[bool], None] = lambda _is_cut: None
    on_look: Callable[[PeerState, float], bool] = lambda _state, _quiet_s: True


class Link(Protocol):
    """Connection to one executor."""

    @property
    def info(self) -> executor.ExecutorInfo:
        """Info that the executor registered with."""

    def send(self, batch: EncodedBatch) -> None:
        """Queues `batch` to be sent."""

    async def get_info(self, timeout_s: float) -> executor.ExecutorInfo:
        """Returns the info of the executor that answers at the address. Raises ExecutorLost."""
        ...

    async def introduce(self, timeout_s: float) -> tuple[executor.ExecutorInfo, bool]:
        """Returns the info, and whether a scheduler drained the executor. Raises ExecutorLost."""
        ...

    async def is_draining(self, timeout_s: float) -> bool:
        """Returns whether the executor says that it is about to exit. Raises ExecutorLost."""
        ...

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Fetches the tokenizer files; empty if the executor has none. Raises ExecutorLost."""
        ...

    async def load_adapter(self, request: executor.LoadAdapterRequest) -> None:
        """Has the executor load an adapter. Raises AdapterNotLoaded."""
        ...

    def results(self) -> AsyncGenerator[executor.StepResult, None]:
        """Yields parts of results, and one result for each batch sent, in order.

        Raises ExecutorLost.
        """

    async def close(self) -> None:
        """Ends all open calls; callers that wait for an answer get ExecutorLost."""


def execute_method(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamMultiCallable:
    """Returns the method `Execute` for encoded batches; that of the stub takes messages."""
    return channel.stream_stream(
        f"/{_SERVICE.full_name}/Execute",
        request_serializer=attrgetter("data"),
        response_deserializer=executor.StepResult.FromString,
    )


class ExecutorLink:
    """Sends batches and yields results in order, across Execute calls that break.

    Batches without a result are sent again in the next call. The executor answers repeats from its
    store (executor.proto, identity rule c), so no step runs twice. While no results come, the link
    sends GetInfo, also over a new connection: the network may have dropped the one in use.
    Implements `Link`.
    """

    def __init__(
        self,
        info: executor.ExecutorInfo,
        config: LinkConfig,
        identity: ClusterIdentity = NOBODY,
    ) -> None:
        """`identity`: credentials that the scheduler shows to the executor."""
        self.info = info
        self._config = config
        self._identity = identity
        self._target = config.target or info.address
        self._metadata = identity.metadata
        self._use(self._open_channel())
        self._unanswered: deque[EncodedBatch] = deque()
        self._outbox: asyncio.Queue[EncodedBatch] = asyncio.Queue()
        self._num_results = 0

    def _open_channel(self) -> grpc.aio.Channel:
        options = [
            *channel_options(self.info.limits.max_message_bytes),
            # With a shared pool, the next life of an executor would wait for this link's backoff.
            ("grpc.use_local_subchannel_pool", 1),
            # Without a proxy, a refused connection was refused by the executor's machine.
            ("grpc.enable_http_proxy", 0),
        ]
        return self._identity.channel(self._target, Role.EXECUTOR, options)

    def _use(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self._execute = execute_method(channel)

    def send(self, batch: EncodedBatch) -> None:
        """Queues `batch` to be sent."""
        self._unanswered.append(batch)
        self._outbox.put_nowait(batch)

    async def get_info(self, timeout_s: float) -> executor.ExecutorInfo:
        """Returns the info of the executor that answers at the address. Raises ExecutorLost."""
        return (await self._get_info(timeout_s)).executor

    async def introduce(self, timeout_s: float) -> tuple[executor.ExecutorInfo, bool]:
        """Returns the info, and whether a scheduler drained the executor. Raises ExecutorLost."""
        answer = await self._get_info(timeout_s)
        return answer.executor, answer.drained

    async def is_draining(self, timeout_s: float) -> bool:
        """Returns whether the same life says that it is about to exit. Raises ExecutorLost."""
        answer = await self._get_info(timeout_s)
        is_same = answer.executor.executor_epoch == self.info.executor_epoch
        return is_same and answer.draining

    async def _get_info(self, timeout_s: float) -> executor.GetInfoResponse:
        try:
            answer: executor.GetInfoResponse = await self._stub.GetInfo(
                executor.GetInfoRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            if failure_of(error).reason == "MODEL_NOT_READY":
                raise ExecutorRestarted(
                    "the executor restarted and is loading its model"
                ) from error
            raise ExecutorLost(f"{error.code().name}: {error.details()}") from error
        except grpc.aio.UsageError as error:
            raise ExecutorLost(_CLOSED) from error
        except asyncio.CancelledError as error:
            asking = asyncio.current_task()
            if asking is None or asking.cancelling():
                raise
            # Not this task was cancelled: closing the channel cancelled the call.
            raise ExecutorLost(_CLOSED) from error
        return answer

    async def check_alive(self) -> None:
        """Raises ExecutorLost unless the same life of the executor answers in time.

        Raises ExecutorRestarted if another life answers: the old one will not come back.
        """
        info = await self.get_info(self._config.reconnect_timeout_s)
        if info.executor_epoch != self.info.executor_epoch:
            raise ExecutorRestarted("the executor restarted")

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Fetches the tokenizer files; empty if the executor has none. Raises ExecutorLost.

        Names and sizes are checked, because the files are served to every client.
        """
        files: dict[str, bytearray] = {}
        num_bytes = 0
        call = self._stub.GetTokenizer(
            executor.GetTokenizerRequest(),
            timeout=self._config.step_timeout_s,
            metadata=self._metadata,
        )
        try:
            async for chunk in call:
                if chunk.file_name not in files:
                    _check_name(chunk.file_name)
                files.setdefault(chunk.file_name, bytearray()).extend(chunk.data)
                num_bytes += len(chunk.data) + len(chunk.file_name)
                if num_bytes > MAX_TOKENIZER_BYTES or len(files) > MAX_TOKENIZER_FILES:
                    raise ExecutorLost(
                        f"the tokenizer has more than {MAX_TOKENIZER_BYTES} bytes or "
                        f"{MAX_TOKENIZER_FILES} files"
                    )
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                raise ExecutorLost(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
        return {name: bytes(data) for name, data in files.items()}

    async def load_adapter(self, request: executor.LoadAdapterRequest) -> None:
        """Has the executor load an adapter. Raises AdapterNotLoaded."""
        try:
            await self._stub.LoadAdapter(
                request, timeout=_LOAD_TIMEOUT_S, metadata=self._metadata, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            # The network may have cut the call. An executor that is gone ends this link. Requests
            # that had the adapter may have ended, and others come.
            is_final = error.code() not in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.NOT_FOUND,
            )
            raise AdapterNotLoaded(failure_of(error).message, is_final=is_final) from error
        except grpc.aio.UsageError as error:
            raise AdapterNotLoaded(_CLOSED, is_final=True) from error

    async def results(self) -> AsyncGenerator[executor.StepResult, None]:
        """Yields parts of results, and one result for each batch sent, in order.

        Yields no part of a step that was sent in an earlier call: parts before it may have been
        lost with that call. Raises ExecutorLost.
        """
        num_fruitless_calls = 0
        while num_fruitless_calls < _MAX_FRUITLESS_CALLS:
            num_fruitless_calls += 1
            try:
                async with aclosing(self._one_call()) as results:
                    async for result in results:
                        num_fruitless_calls = 0
                        yield result
                problem = "the executor closed the stream"
            except _ConnectionCut:
                problem = f"no answer on this connection for {SILENT_AFTER_S:g} s, only on new ones"
                await self._channel.close()
                self._use(self._open_channel())
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            _log.warning("execute_stream_cut address=%s problem=%r", self.info.address, problem)
            self._config.on_cut(True)
            await self._wait_until_alive(problem)
            self._config.on_cut(False)
        raise ExecutorLost(
            f"{_MAX_FRUITLESS_CALLS} streams ended without a result; last: {problem}"
        )

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def _one_call(self) -> AsyncGenerator[executor.StepResult, None]:
        self._outbox = asyncio.Queue()
        last_repeated = self._unanswered[-1].step_id if self._unanswered else 0
        for batch in self._unanswered:
            self._outbox.put_nowait(batch)
        call = self._execute(metadata=self._metadata)
        writer = asyncio.create_task(self._write(call, self._outbox))
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(lambda _watching: call.cancel())
        try:
            while (result := await self._read(call, watching)) is not grpc.aio.EOF:
                self._num_results += 1
                if is_part(result):
                    if result.step_id <= last_repeated:
                        continue
                elif self._unanswered and result.step_id == self._unanswered[0].step_id:
                    self._unanswered.popleft()
                yield result
        finally:
            watching.cancel()
            writer.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await writer
            await asyncio.gather(watching, return_exceptions=True)
            call.cancel()

    @staticmethod
    async def _read(call: grpc.aio.StreamStreamCall, watching: asyncio.Task[None]) -> Any:  # noqa: ANN401
        """Reads the next result, or EOF. If `watching` ended the call, raises its exception."""
        try:
            return await call.read()
        except asyncio.CancelledError:
            reading = asyncio.current_task()
            if watching.done() and not (reading and reading.cancelling()):
                watching.result()
            raise

    async def _watch(self) -> None:
        """Watches the executor until cancelled.

        Raises ExecutorSilent or _ConnectionCut if the executor does not answer.
        """
        watch = PeerWatch(self._ask, self._ask_anew, lambda: self._num_results)
        try:
            while True:
                state = await watch.tick()
                if self._unanswered and not self.info.answers_while_computing:
                    watch.heard()
                    state = watch.state
                may_give_up = self._config.on_look(state, watch.quiet_s)
                if state is PeerState.CUT:
                    raise _ConnectionCut
                if state is PeerState.SILENT and may_give_up:
                    raise ExecutorSilent(f"no answer for {SILENT_AFTER_S:g} s")
        finally:
            await watch.close()

    async def _ask(self) -> bool:
        question = executor.GetInfoRequest()
        try:
            await self._stub.GetInfo(question, timeout=SILENT_AFTER_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return is_answer(error)
        except grpc.aio.UsageError:  # the link is closed
            return False
        return True

    async def _ask_anew(self) -> bool:
        """Returns whether the same life of the executor answers over a new connection."""
        async with self._open_channel() as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            question = executor.GetInfoRequest()
            try:
                answer = await stub.GetInfo(
                    question, timeout=SILENT_AFTER_S, metadata=self._metadata
                )
            except grpc.aio.AioRpcError:
                return False
            same: bool = answer.executor.executor_epoch == self.info.executor_epoch
            return same

    @staticmethod
    async def _write(call: grpc.aio.StreamStreamCall, outbox: asyncio.Queue[EncodedBatch]) -> None:
        with suppress(asyncio.InvalidStateError):
            while True:
                await call.write(await outbox.get())

    async def _wait_until_alive(self, problem: str) -> None:
        """Waits until the executor answers again.

        Raises ExecutorLost: at once if the life is certainly over, else after the reconnect
        timeout.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.reconnect_timeout_s
        while True:
            if await is_refused(self._target):
                raise ExecutorGone(f"{problem}; the address now refuses connections")
            await asyncio.sleep(_RETRY_PAUSE_S)
            try:
                await self.check_alive()
                return
            except ExecutorGone:
                raise
            except ExecutorLost as lost:
                if loop.time() >= deadline:
                    raise ExecutorSilent(f"{problem}; then {lost}") from lost


def _check_name(file_name: str) -> None:
    """Raises ExecutorLost if the name of a tokenizer file is not safe to serve to clients."""
    try:
        check_file_name(file_name)
    except ValueError as error:
        shown = printable(file_name[:_MAX_SHOWN_CHARS])
        raise ExecutorLost(f"the tokenizer has a file named '{shown}': {error}") from error


# -- Probe of an address ---------------------------------------------------------------------------

_TIMEOUT_S = 1.0


async def is_refused(target: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Returns whether every address of `target` (`host:port`) refuses TCP connections.

    If so, the process that listened there is gone. Returns False if that is not certain: a process
    accepts the connection, the name or route is unknown, or no answer comes within `timeout_s`.
    """
    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)
                    try:
                        await loop.sock_connect(probe, address)
                    except ConnectionRefusedError:
                        continue
                return False
    except (OSError, ValueError, OverflowError):  # TimeoutError is an OSError
        return False
    return bool(found)
