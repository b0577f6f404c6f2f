"""Calls of a client to a scheduler, with the errors of this package."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2

from splitserve.scheduler.v1 import admin_pb2, live_pb2, scheduler_pb2
from splitserve_client.channels import Stubs, is_cancelled
from splitserve_client.client_config import ApiKey, ClientConfig, Metadata
from splitserve_client.errors import Draining, ModelNotReady, ServerUnreachable, error_of_failure
from splitserve_client.schedulers import Elsewhere, Schedulers, Target, open_channels, open_target
from splitserve_common import (
    StaticDiscovery,
    check_file_name,
    is_address,
    is_loopback,
    names_several,
)
from splitserve_rpc import (
    MAX_NAMED,
    ClusterIdentity,
    bearer_credential,
    duration_from_s,
    failure_of,
    is_answering,
)
from splitserve_text import InvalidRequest, SplitserveError, TokenizerUnavailable

# A named scheduler may itself stop and name the next one.
MAX_HOPS = 4

# Resolvers read `127.1`, `2130706433` and `0x7f.1` as addresses: a name does not end in a number.
_NAME = re.compile(r"([a-z0-9_-]+\.)*(?!\d+$|0x[0-9a-f]*$)[a-z0-9_-]+")
# gRPC takes these words before a colon for resolver schemes: `unix:1` is a socket of this machine.
_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p"})


def allowed(
    address: str, named: Sequence[str], *, has_credential: bool, is_trusted: bool
) -> list[str]:
    """Returns the addresses in `named`, sent by the scheduler at `address`, where a client may go.

    A client with a credential goes to other hosts only if `is_trusted`: their certificates are
    signed by the operator's own authority. A remote scheduler cannot name this machine.
    """
    host = _host(address)
    return [
        each
        for each in dict.fromkeys(named[:MAX_NAMED])
        if is_address(each)
        and _is_plain(_host(each))
        and (_host(each) == host or not has_credential or is_trusted)
        and (is_loopback(address) or not _is_local(_host(each)))
    ]


def _host(address: str) -> str:
    """Returns the host of an address in the form that resolvers see."""
    return address.rpartition(":")[0].strip("[]").lower().removesuffix(".")


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    """Parses an IP address; None: `host` is a name."""
    try:
        ip = ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _is_plain(host: str) -> bool:
    """Returns whether `host` is unambiguously an IP address or a name.

    gRPC decodes what follows a `%`; zones occur only in addresses of this link.
    """
    if "%" in host:
        return False
    return _ip(host) is not None or (_NAME.fullmatch(host) is not None and host not in _SCHEMES)


def _is_local(host: str) -> bool:
    """Returns whether `host` is this machine or this link; names are not resolved."""
    ip = _ip(host)
    if ip is None:
        return host == "localhost" or host.endswith(".localhost")
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified


# Files are read and sent, or read and hashed, in this time.
_FILES_TIMEOUT_S = 60.0
# Time without a useful response after which the scheduler may be without executors.
_SILENCE_S = 5.0

Method = Callable[[Stubs], Callable[..., Any]]
IsProgress = Callable[[Any], bool]


class Connection:
    """Calls the services of a scheduler. Methods raise SplitserveError."""

    def __init__(self, address: str, config: ClientConfig) -> None:
        """Reads the credentials and opens the target.

        Raises CredentialsUnusable, and ServerUnreachable for malformed addresses.
        """
        self._timeout_s = config.connect_timeout_s
        self._api_key = ApiKey(config.api_key, config.api_key_file)
        self._operator = ClusterIdentity(token=config.cluster_token)
        self._address = address
        self._config = config
        self._target = open_target(address, config)
        # Earlier targets, on which calls may still run.
        self._left: list[Target] = []

    async def close(self) -> None:
        """Ends all calls and closes all targets."""
        for target in (*self._left, self._target):
            await target.close()

    @property
    def is_ready(self) -> bool:
        """True if the target's last known state is connected."""
        return self._target.is_ready

    @property
    def credential(self) -> object:
        """Metadata that every call carries now; the same object until the credential changes."""
        return self._api_key.current()

    async def connect(self) -> None:
        """Waits for the first connection. Raises ServerUnreachable when it is refused."""
        async with self._target.call(self._timeout_s):
            pass

    async def model(self) -> scheduler_pb2.GetModelResponse:
        """Fetches the served model. Raises ModelNotReady."""
        request = scheduler_pb2.GetModelRequest()
        response: scheduler_pb2.GetModelResponse
        response = await self.unary(lambda stubs: stubs.scheduler.GetModel, request)
        return response

    async def is_answering(self) -> bool:
        """Returns whether the scheduler answers, with any status."""
        try:
            async with self._target.call(self._timeout_s) as stubs:
                return await is_answering(stubs.channel)
        except SplitserveError:
            return False

    def reconnect(self) -> None:
        """Opens a new connection for later calls."""
        self._target.renew()

    async def is_serving(self) -> bool:
        """Returns the overall status reported by the standard health service."""
        request = health_pb2.HealthCheckRequest()
        answer = await self.unary(lambda stubs: stubs.health.Check, request)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def max_message_bytes(self) -> float:
        """Returns the server's message size limit in bytes.

        Infinite if unknown, so that the server refuses.
        """
        try:
            return (await self.model()).max_message_bytes or math.inf
        except SplitserveError:
            return math.inf

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Fetches the tokenizer files by name. Raises ModelNotReady, TokenizerUnavailable."""
        files: dict[str, bytearray] = {}
        request = scheduler_pb2.GetTokenizerRequest()
        pieces = self.stream(lambda stubs: stubs.scheduler.GetTokenizer, request, _FILES_TIMEOUT_S)
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.file_name not in files:
                    _check_name(piece.file_name)
                files.setdefault(piece.file_name, bytearray()).extend(piece.data)
        return {name: bytes(data) for name, data in files.items()}

    async def abort(self, request_id: str) -> None:
        """Aborts an unfinished request. Raises RequestUnknown."""
        request = scheduler_pb2.AbortRequest(request_id=request_id)
        await self.unary(lambda stubs: stubs.scheduler.Abort, request)

    async def identify(self, credential: str | None) -> scheduler_pb2.IdentifyResponse:
        """Fetches the owner of a credential; None: our own. Raises CallerUnknown."""
        if credential is None:
            credential = bearer_credential(self._api_key.current())
        request = scheduler_pb2.IdentifyRequest(credential=credential)
        response: scheduler_pb2.IdentifyResponse
        response = await self.unary(lambda stubs: stubs.scheduler.Identify, request)
        return response

    async def adapters(self, credential: str | None) -> scheduler_pb2.ListAdaptersResponse:
        """Lists the adapters that the owner of `credential` may use; None: our own."""
        request = scheduler_pb2.ListAdaptersRequest()
        response: scheduler_pb2.ListAdaptersResponse
        response = await self.unary(
            lambda stubs: stubs.scheduler.ListAdapters, request, credential=credential
        )
        return response

    async def load_adapter(
        self, name: str, path: str, *, replace: bool
    ) -> admin_pb2.LoadAdapterResponse:
        """Registers an adapter; for operators."""
        request = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
        response: admin_pb2.LoadAdapterResponse
        response = await self.unary(
            lambda stubs: stubs.admin.LoadAdapter,
            request,
            self._operator.metadata,
            timeout_s=_FILES_TIMEOUT_S,
        )
        return response

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter; for operators."""
        request = admin_pb2.UnloadAdapterRequest(name=name)
        await self.unary(lambda stubs: stubs.admin.UnloadAdapter, request, self._operator.metadata)

    async def executors(self) -> admin_pb2.ListExecutorsResponse:
        """Lists the executors; for operators."""
        request = admin_pb2.ListExecutorsRequest()
        response: admin_pb2.ListExecutorsResponse
        response = await self.unary(
            lambda stubs: stubs.admin.ListExecutors, request, self._operator.metadata
        )
        return response

    def watch(
        self, frames_per_second: int
    ) -> AsyncGenerator[live_pb2.WatchSchedulerResponse, None]:
        """Streams frames of the scheduler's activity; for operators."""
        request = live_pb2.WatchSchedulerRequest(frames_per_second=frames_per_second)
        return self.stream(
            lambda stubs: stubs.live.WatchScheduler, request, metadata=self._operator.metadata
        )

    async def explain(self, request_id: str) -> admin_pb2.ExplainResponse:
        """Fetches the history of a request; for operators."""
        request = admin_pb2.ExplainRequest(request_id=request_id)
        response: admin_pb2.ExplainResponse
        response = await self.unary(
            lambda stubs: stubs.admin.Explain, request, self._operator.metadata
        )
        return response

    async def explain_queue(self) -> admin_pb2.ExplainQueueResponse:
        """Fetches why the first requests of the waiting queue wait; for operators."""
        request = admin_pb2.ExplainQueueRequest()
        response: admin_pb2.ExplainQueueResponse
        response = await self.unary(
            lambda stubs: stubs.admin.ExplainQueue, request, self._operator.metadata
        )
        return response

    async def drain_executor(
        self, address: str, timeout_s: float | None
    ) -> admin_pb2.DrainExecutorResponse:
        """Drains an executor; has no timeout of its own."""
        request = admin_pb2.DrainExecutorRequest(address=address)
        if timeout_s is not None:
            if not math.isfinite(timeout_s):
                raise InvalidRequest(f"timeout_s is {timeout_s}; allowed: 0 to 3600")
            request.timeout.CopyFrom(duration_from_s(timeout_s))
        metadata = (*self._api_key.current(), *self._operator.metadata)
        async with self._target.call(self._timeout_s) as stubs:
            try:
                response: admin_pb2.DrainExecutorResponse
                response = await stubs.admin.DrainExecutor(request, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise error_of_failure(failure_of(error)) from error
        return response

    async def undrain_executor(self, address: str) -> None:
        """Takes a drained executor back."""
        request = admin_pb2.UndrainExecutorRequest(address=address)
        await self.unary(
            lambda stubs: stubs.admin.UndrainExecutor, request, self._operator.metadata
        )

    def session(
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest]
    ) -> AsyncGenerator[scheduler_pb2.SessionResponse, None]:
        """Opens a session and returns its responses to `requests`."""
        return self.stream(
            lambda stubs: stubs.scheduler.Session, requests, is_progress=_is_more_than_refusals
        )

    async def unary(
        self,
        method: Method,
        request: object,
        metadata: Metadata = (),
        *,
        credential: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        """Makes a short call and returns its answer.

        `metadata`: in addition to that of every call. `credential`: in place of our own.
        `timeout_s`: None for that of short calls.
        """
        key = self._api_key if credential is None else ApiKey(credential, None)
        async with self._target.call(self._timeout_s) as stubs:
            metadata = (*key.current(), *metadata)
            try:
                return await method(stubs)(
                    request, timeout=timeout_s or self._timeout_s, metadata=metadata
                )
            except grpc.aio.AioRpcError as error:
                raise error_of_failure(failure_of(error)) from error

    async def stream(
        self,
        method: Method,
        request: object,
        timeout_s: float | None = None,
        is_progress: IsProgress = lambda _response: True,
        metadata: Metadata = (),
    ) -> AsyncGenerator[Any, None]:
        """Makes a streaming call and yields its responses; closing the iterator ends the call.

        `is_progress`: returns whether a response shows that an executor computes. `metadata`: in
        addition to that of every call.
        """
        target = self._target
        async with target.call(self._timeout_s) as stubs:
            metadata = (*self._api_key.current(), *metadata)
            call = method(stubs)(request, timeout=timeout_s, metadata=metadata)
            elsewhere = target.elsewhere
            unanswered = None if elsewhere is None else partial(elsewhere, stubs, is_silent=True)
            try:
                async with stubs.streams.stream(call, unanswered):
                    async for response in _responses(call, stubs, elsewhere, is_progress):
                        stubs.streams.num_responses += 1
                        yield response
            except grpc.aio.AioRpcError as error:
                raise self._followed(error_of_failure(failure_of(error)), target) from error
            except asyncio.CancelledError as error:
                if is_cancelled() or not stubs.streams.problem:
                    raise
                raise ServerUnreachable(stubs.streams.problem) from error
            finally:
                call.cancel()

    def goes_on_elsewhere(self, error: SplitserveError) -> bool:
        """Returns whether calls that begin after `error` go to a scheduler that is not stopping.

        `error` arrived over a stream that continues.
        """
        if isinstance(error, ModelNotReady):
            return self._target.has_left_one
        if isinstance(error, Draining):
            self._target.leave()
        return self._followed(error, self._target) is not error

    def named_schedulers(self, error: SplitserveError) -> list[str]:
        """Returns addresses where calls may continue after `error`; empty: only here."""
        config, address = self._config, self._address
        if not isinstance(error, Draining) or not config.follows_peers or names_several(address):
            return []
        if len(self._left) >= MAX_HOPS:
            return []
        is_trusted = config.tls is not None and config.tls.ca is not None
        # An operator's calls go to the same scheduler as requests.
        has_credential = config.has_api_key or config.cluster_token is not None
        return allowed(
            address, error.schedulers, has_credential=has_credential, is_trusted=is_trusted
        )

    def _followed(self, error: SplitserveError, target: Target) -> SplitserveError:
        """Returns `error`, or ServerUnreachable if calls continue at schedulers that `error` names.

        `target`: where the call ran. All streams of a target get the same error; together they
        count as one hop.
        """
        if isinstance(error, ModelNotReady) and target.has_left_one:
            return ServerUnreachable(error.message, error.reason)
        knows_others = target is not self._target or names_several(self._address)
        if knows_others and isinstance(error, Draining):
            return ServerUnreachable(error.message, error.reason)
        named = self.named_schedulers(error)
        if not named:
            return error
        self._left.append(self._target)
        found = StaticDiscovery([*dict.fromkeys((self._address, *named))])
        opening = partial(open_channels, self._config)
        clock = self._config.timing.clock
        self._target = Schedulers(found, opening, clock, stopping=self._address)
        return ServerUnreachable(error.message, error.reason)


def _check_name(file_name: str) -> None:
    """Raises TokenizerUnavailable for a file name that an application must not use."""
    try:
        check_file_name(file_name)
    except ValueError as error:
        raise TokenizerUnavailable(f"the name of a tokenizer file is invalid: {error}") from error


def _is_more_than_refusals(response: scheduler_pb2.SessionResponse) -> bool:
    """Returns whether a response holds more than refusals.

    A scheduler without an executor may refuse the same requests again and again.
    """
    return bool(response.handles) or any(
        not event.HasField("rejected") for event in response.events
    )


async def _responses(
    call: Any,  # noqa: ANN401
    stubs: Stubs,
    elsewhere: Elsewhere | None,
    is_progress: IsProgress,
) -> AsyncGenerator[Any, None]:
    """Yields the responses of `call`.

    Raises ServerUnreachable if another scheduler has an executor.

    A scheduler without an executor keeps its requests waiting. After 5 s of silence this looks for
    a scheduler that can serve the call.
    """
    if elsewhere is None:
        async for response in call:
            yield response
        return
    clock = asyncio.get_running_loop().time
    look_at_s = clock() + _SILENCE_S
    while True:
        reading = asyncio.ensure_future(call.read())
        try:
            while not (await asyncio.wait([reading], timeout=max(look_at_s - clock(), 0.0)))[0]:
                if await _is_better(asyncio.ensure_future(elsewhere(stubs)), reading):
                    raise ServerUnreachable("the scheduler does not serve, and another does")
                look_at_s = clock() + _SILENCE_S
        finally:
            reading.cancel()
        response = reading.result()
        if response is grpc.aio.EOF:
            return
        yield response
        if is_progress(response):
            look_at_s = clock() + _SILENCE_S


async def _is_better(looking: asyncio.Future[bool], reading: asyncio.Future[Any]) -> bool:
    """Returns the result of `looking`; False if `reading` is done first."""
    try:
        await asyncio.wait([looking, reading], return_when=asyncio.FIRST_COMPLETED)
        return not reading.done() and looking.result()
    finally:
        looking.cancel()
