"""The Execute call to one executor, made again when it breaks as long as the executor lives."""

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

from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.step_codec import EncodedBatch
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc.cluster_identity import NOBODY, ClusterIdentity, Role
from splitserve_rpc.errors import failure_of
from splitserve_rpc.file_names import check_file_name
from splitserve_rpc.peer_watch import SILENT_AFTER_S, PeerState, PeerWatch, is_answer
from splitserve_rpc.printable import printable
from splitserve_rpc.server import channel_options

_RETRY_PAUSE_S = 0.1
_MAX_FRUITLESS_CALLS = 10
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
MAX_TOKENIZER_FILES = 64
_MAX_SHOWN_CHARS = 80
_CLOSED = "its link is closed"
_SERVICE = executor.DESCRIPTOR.services_by_name["ExecutorService"]

_log = logging.getLogger(__name__)


class ExecutorLost(Exception):
    """The executor died, restarted, or does not answer."""

    cause = LossCause.DIED


class ExecutorSilent(ExecutorLost):
    """It does not answer: it may hang, or live and be out of reach."""

    cause = LossCause.SILENT


class ExecutorGone(ExecutorLost):
    """Nobody listens at the address, or another life does: no use to wait for the old one."""


class _ConnectionCut(Exception):
    """It lives, and what is said over the connection in use does not get there."""


class ExecutorRestarted(ExecutorGone):
    """Another life answers at the address."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """How patient a link is with a broken call and with one that streams files, and where it dials.

    `target` None: at the address of the executor's info, which may be a name. `on_cut`: told that
    the Execute call broke, and that the executor is there again. `on_look`: told twice a second
    what is known of the executor, and for how many seconds it has said nothing; returns whether it
    is given up if it is silent.
    """

    reconnect_timeout_s: float
    step_timeout_s: float
    target: str | None = None
    on_cut: Callable[[bool], None] = lambda _is_cut: None
    on_look: Callable[[PeerState, float], bool] = lambda _state, _quiet_s: True


class Link(Protocol):
    """The way to one executor."""

    @property
    def info(self) -> executor.ExecutorInfo:
        """What the executor is."""

    def send(self, batch: EncodedBatch) -> None:
        """Queues `batch` to be sent."""

    async def get_info(self, timeout_s: float) -> executor.ExecutorInfo:
        """What answers there says of itself. Raises ExecutorLost."""
        ...

    async def introduce(self, timeout_s: float) -> tuple[executor.ExecutorInfo, bool]:
        """As `get_info`, and whether it says that a scheduler sent it away. Raises ExecutorLost."""
        ...

    async def is_draining(self, timeout_s: float) -> bool:
        """Whether what answers there says that it is about to end. Raises ExecutorLost."""
        ...

    async def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer files, empty if the executor has none. Raises ExecutorLost."""
        ...

    def results(self) -> AsyncGenerator[executor.StepResult, None]:
        """Yields one result for each batch sent, in order. Raises ExecutorLost."""

    async def close(self) -> None:
        """Ends what is open; whoever waits for an answer is told ExecutorLost."""


def execute_method(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamMultiCallable:
    """`Execute` for batches that are encoded already; that of the stub takes messages."""
    return channel.stream_stream(
        f"/{_SERVICE.full_name}/Execute",
        request_serializer=attrgetter("data"),
        response_deserializer=executor.StepResult.FromString,
    )


class ExecutorLink:
    """Sends batches and yields results in order, across calls that break.

    Batches without a result are sent again in the next call; the executor answers repeats from its
    store (executor.proto, identity rule c), so nothing runs twice. While no results come it is
    asked whether it is there, over a new connection too: that in use may be forgotten on the way.
    """

    def __init__(
        self,
        info: executor.ExecutorInfo,
        config: LinkConfig,
        identity: ClusterIdentity = NOBODY,
    ) -> None:
        """`identity`: who we are to the executor."""
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
            # Or the next life of an executor would wait for the retry of this one.
            ("grpc.use_local_subchannel_pool", 1),
            # Whoever refuses connections is to be the executor's machine.
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
        """What answers at the address says of itself. Raises ExecutorLost."""
        return (await self._get_info(timeout_s)).executor

    async def introduce(self, timeout_s: float) -> tuple[executor.ExecutorInfo, bool]:
        """As `get_info`, and whether it says that a scheduler sent it away. Raises ExecutorLost."""
        answer = await self._get_info(timeout_s)
        return answer.executor, answer.drained

    async def is_draining(self, timeout_s: float) -> bool:
        """Whether it says, in the same life, that it is about to end. Raises ExecutorLost."""
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
                raise ExecutorRestarted("a new life of it loads its model") from error
            raise ExecutorLost(f"{error.code().name}: {error.details()}") from error
        except grpc.aio.UsageError as error:
            raise ExecutorLost(_CLOSED) from error
        except asyncio.CancelledError as error:
            asking = asyncio.current_task()
            if asking is None or asking.cancelling():
                raise
            # Closing a channel cancels its calls, and not who waits for them.
            raise ExecutorLost(_CLOSED) from error
        return answer

    async def check_alive(self) -> None:
        """Raises ExecutorLost unless the executor answers, in the same life, in time.

        ExecutorRestarted: it will not, however long one waits.
        """
        info = await self.get_info(self._config.reconnect_timeout_s)
        if info.executor_epoch != self.info.executor_epoch:
            raise ExecutorRestarted("it has restarted")

    async def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer files, empty if the executor has none. Raises ExecutorLost.

        Names and sizes are checked: they are given to every client.
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
                        f"its tokenizer has more than {MAX_TOKENIZER_BYTES} bytes or "
                        f"{MAX_TOKENIZER_FILES} files"
                    )
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                raise ExecutorLost(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
        return {name: bytes(data) for name, data in files.items()}

    async def results(self) -> AsyncGenerator[executor.StepResult, None]:
        """Yields one result for each batch sent, in order. Raises ExecutorLost."""
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
                problem = f"it answers over new connections only, for {SILENT_AFTER_S:g} s"
                await self._channel.close()
                self._use(self._open_channel())
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            _log.warning("execute_stream_cut address=%s problem=%r", self.info.address, problem)
            self._config.on_cut(True)
            await self._wait_until_alive(problem)
            self._config.on_cut(False)
        raise ExecutorLost(f"its stream breaks before any result; last: {problem}")

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def _one_call(self) -> AsyncGenerator[executor.StepResult, None]:
        self._outbox = asyncio.Queue()
        for batch in self._unanswered:
            self._outbox.put_nowait(batch)
        call = self._execute(metadata=self._metadata)
        writer = asyncio.create_task(self._write(call, self._outbox))
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(lambda _watching: call.cancel())
        try:
            while (result := await self._read(call, watching)) is not grpc.aio.EOF:
                self._num_results += 1
                if self._unanswered and result.step_id == self._unanswered[0].step_id:
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
        """The next result, or EOF. Raises what `watching` raised when it ended the call."""
        try:
            return await call.read()
        except asyncio.CancelledError:
            reading = asyncio.current_task()
            if watching.done() and not (reading and reading.cancelling()):
                watching.result()
            raise

    async def _watch(self) -> None:
        """Never ends by itself. Raises ExecutorSilent or _ConnectionCut if nothing is answered."""
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
                    raise ExecutorSilent(f"it has not answered for {SILENT_AFTER_S:g} s")
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
        """Whether it answers over a new connection, in the same life."""
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
        """Raises ExecutorLost: at once where it is certain, else after the reconnect timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.reconnect_timeout_s
        while True:
            if await is_refused(self._target):
                raise ExecutorGone(f"{problem}; nobody listens at its address any more")
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
    """Raises ExecutorLost for a name of a tokenizer file that clients should not get."""
    try:
        check_file_name(file_name)
    except ValueError as error:
        shown = printable(file_name[:_MAX_SHOWN_CHARS])
        raise ExecutorLost(f"its tokenizer has a file named '{shown}': {error}") from error


# -- Whether anybody listens at an address, as the machine there says by itself --------------------

_TIMEOUT_S = 1.0


async def is_refused(target: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Whether every address that `target` (`host:port`) stands for refuses connections.

    Nobody listens there then, and whoever did is gone. False where that is not certain: there is
    somebody, or no answer in time, no way there, no such name.
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
    except (OSError, ValueError, OverflowError):  # TimeoutError, too
        return False
    return bool(found)
