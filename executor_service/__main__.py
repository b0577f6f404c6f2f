"""Composition root of the executor process: read config, bind, load, serve, register, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from executor_service.config import ExecutorConfig, start_again
from executor_service.errors import ExecutorError, RecordingFailed
from executor_service.service import (
    SERVICE,
    AdapterLoading,
    Departures,
    ExecutorLives,
    ExecutorServicer,
    GrpcRegistry,
    Membership,
    Pacing,
    ReadyExecutor,
    Registrar,
    StepWorker,
    advertised_address,
)
from executor_service.steps import StepExecutor
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_common import (
    CannotListen,
    Discovery,
    FilesUnusable,
    discovery,
    imports_without_collections,
    is_loopback,
    printable,
    say_why_not,
    start_logging,
)
from splitserve_contract import DomainError
from splitserve_options import BUNDLED_MODEL, options
from splitserve_rpc import (
    Access,
    CertificateEnds,
    RunningServer,
    SecurityUnusable,
    ServerSecurity,
    bind_server,
    ignore_refusal,
    stop_event,
)

if TYPE_CHECKING:
    from executor_service.engine_loader import LoadedEngine
    from executor_service.metrics import ExecutorMetrics
    from splitserve_common import StandardError

_HEALTH_SERVICES = ("", SERVICE)
_STOP_GRACE_S = 1.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Torch releases the interpreter lock at every operation. With the default of 5 ms the computing
# thread then waits for the gRPC thread. Measured between two steps: 0.44 ms instead of 0.58.
_SWITCH_INTERVAL_S = 0.0002

_log = logging.getLogger("executor_service")
_Result = TypeVar("_Result")


async def serve(config: ExecutorConfig) -> bool:
    """Serves until told to stop, then drains. Returns False if the stop came while a thread loads.

    Raises CannotListen, ExecutorError, and FilesUnusable for an unusable file of schedulers.
    """
    executor_epoch = time.time_ns()
    schedulers = discovery(config.scheduler)
    stop = stop_event(config.exit_on_stdin_eof, config.drain_timeout_s + _STOP_GRACE_S)
    identity = config.security.identity
    has_reflection = is_loopback(config.listen)
    metrics = _open_metrics(config)
    on_refusal = ignore_refusal if metrics is None else metrics.refused
    security = ServerSecurity(Access(identity), identity.tls, has_reflection, on_refusal)
    running = bind_server(config.listen, (SERVICE,), security=security)
    servicer = ExecutorServicer(None if metrics is None else metrics.answered)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    await running.set_serving(_HEALTH_SERVICES, False)
    # Metrics first, as their address may be taken: a started gRPC server would have to be stopped.
    if metrics is not None:
        await metrics.serve()
    await running.server.start()
    _log.info("model_loading model=%s port=%d", config.model, running.port)
    looking = asyncio.create_task(CertificateEnds(config.security.shown).keep_looking())
    try:
        loaded = await _run_unless(stop, lambda: _load(config, executor_epoch))
        if loaded is not None:
            _log_ready(loaded)
            serving = _Serving(loaded, config, running, servicer)
            if metrics is not None:
                serving.show(metrics)
            await serving.run(schedulers, stop)
    finally:
        looking.cancel()
        if metrics is not None:
            await metrics.close()
        await running.stop(_STOP_GRACE_S)
    _log.info("executor_stopped")
    return loaded is not None


def _open_metrics(config: ExecutorConfig) -> ExecutorMetrics | None:
    """Returns the metrics, or None if no address for them is configured.

    Without an address the metrics module is not imported and nothing is counted.
    """
    if config.metrics is None:
        return None
    from executor_service.metrics import ExecutorMetrics

    return ExecutorMetrics(config.metrics)


def _load(config: ExecutorConfig, executor_epoch: int) -> LoadedEngine:
    # Torch takes seconds to import; by now the port is bound and health is answered.
    with imports_without_collections():
        from executor_service.checkpoint import check_directory
    if config.model != BUNDLED_MODEL:
        check_directory(config.model)
    if config.draft_model not in (None, BUNDLED_MODEL):
        check_directory(config.draft_model)
    with imports_without_collections():
        from executor_service.engine_loader import load_engine
    loaded = load_engine(config, executor_epoch)
    # Objects of the model live as long; no collection during a step needs to visit them.
    gc.collect()
    gc.freeze()
    return loaded


class _Serving:
    """Serves a loaded engine to schedulers, from registration until it has drained."""

    def __init__(
        self,
        loaded: LoadedEngine,
        config: ExecutorConfig,
        running: RunningServer,
        servicer: ExecutorServicer,
    ) -> None:
        host = config.listen.rpartition(":")[0]
        info = replace(loaded.info, address=config.advertise_address or f"{host}:{running.port}")
        self._loaded = loaded
        self._config = config
        self._running = running
        self._servicer = servicer
        self._worker = StepWorker(StepExecutor(info, loaded.runner, grammars=loaded.grammars))
        departures = Departures(self._door, servicer, config.drain_timeout_s)
        self._lives = ExecutorLives(
            info, self._address_for, departures, self._worker, servicer.streams
        )

    def show(self, metrics: ExecutorMetrics) -> None:
        """Has `metrics` observe the engine, the step worker, the streams and the drafts."""
        loaded = self._loaded
        metrics.watch(loaded.info, self._worker, self._servicer.streams, loaded.drafts)

    async def run(self, schedulers: Discovery, stop: asyncio.Event) -> None:
        servicer, running, loaded = self._servicer, self._running, self._loaded
        membership = self._membership(schedulers)
        servicer.serve(
            ReadyExecutor(
                self._worker,
                lambda: self._worker.describe(self._lives.info),
                loaded.tokenizer_files,
                lambda: self._lives.is_drained,
                self._adapter_loading(membership),
            )
        )
        await running.set_serving(_HEALTH_SERVICES, True)
        registrar = Registrar(
            membership,
            membership.describe,
            membership.wait_unwatched,
            self._worker.adopt_scheduler_epoch,
        )
        works = (registrar.run(), membership.keep_preferred(), membership.keep_answered())
        registering = [asyncio.create_task(work) for work in works]
        stopping = asyncio.create_task(stop.wait())
        # Registration ends only by a bug; the process then stops, as no scheduler can find it.
        await asyncio.wait({*registering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        _log.info("executor_draining")
        await running.set_serving(_HEALTH_SERVICES, False)
        stopping.cancel()
        for task in registering:
            task.cancel()
        for task in registering:
            with suppress(asyncio.CancelledError):
                await task
        await _unless_told_again(self._drain(membership.scheduler))
        if loaded.grammars is not None:
            await asyncio.to_thread(loaded.grammars.close)

    async def _drain(self, scheduler: str | None) -> None:
        if scheduler is not None:
            await self._lives.leave(scheduler)
        await self._servicer.drain()

    def _door(self, scheduler: str) -> GrpcRegistry:
        return GrpcRegistry(scheduler, self._config.security.identity)

    def _adapter_loading(self, membership: Membership) -> AdapterLoading | None:
        if self._loaded.adapters is None:
            return None

        def fetch(digest: str) -> AsyncGenerator[tuple[str, bytes], None]:
            if membership.scheduler is None:
                raise DomainError("ADAPTER_INVALID", "its files are not here, and no scheduler is")
            return self._door(membership.scheduler).fetch_adapter(digest)

        return AdapterLoading(self._loaded.adapters, fetch)

    def _membership(self, schedulers: Discovery) -> Membership:
        config, port = self._config, self._running.port
        return Membership(
            schedulers,
            config.advertise_address or f"{socket.gethostname()}:{port}",
            self._door,
            self._lives,
            self._servicer.streams,
            Pacing(),
            move_after_s=config.move_after_s,
        )

    async def _address_for(self, scheduler: str) -> str:
        config = self._config
        if config.advertise_address is not None:
            return config.advertise_address
        return await advertised_address(config.listen, self._running.port, scheduler)


async def _unless_told_again(work: Coroutine[None, None, None]) -> None:
    """Awaits `work`, and cancels it if the process gets another stop signal.

    A third signal kills the process, in case a step hangs, for example.
    """
    working = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def end() -> None:
        working.cancel()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, end)
    with suppress(asyncio.CancelledError):
        await working


async def _run_unless(stop: asyncio.Event, work: Callable[[], _Result]) -> _Result | None:
    """Returns the result of `work`, run in a thread; None if `stop` comes first.

    In that case the thread goes on, and its result is dropped.
    """
    outcome: Future[_Result] = Future()

    def run() -> None:
        # A cancelled future refuses the result; it is dropped.
        with suppress(InvalidStateError):
            try:
                outcome.set_result(work())
            except InvalidStateError:
                raise
            except BaseException as error:
                outcome.set_exception(error)

    threading.Thread(target=run, name="model-loader", daemon=True).start()
    working, stopping = asyncio.wrap_future(outcome), asyncio.create_task(stop.wait())
    either: set[asyncio.Future[Any]] = {working, stopping}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    return None


def _log_ready(loaded: LoadedEngine) -> None:
    info = loaded.info
    _log.info(
        "model_loaded name=%s architecture=%s dtype=%s device=%s compute=%r"
        " num_device_blocks=%d"
        " num_host_blocks=%d max_model_len=%d",
        info.model.name,
        loaded.architecture,
        info.model.dtype,
        loaded.device,
        loaded.compute,
        info.num_device_blocks,
        info.num_host_blocks,
        info.model.max_model_len,
    )


def main() -> int:
    """Runs the process. Returns its exit code.

    0 after a stop; 2 if configuration, files or model cannot be used; 1 if the address is taken.
    """
    try:
        values = options.parse("executor", sys.argv[1:], os.environ)
        errors = start_logging(str(values["log_level"]), str(values["log_format"]))
        config = ExecutorConfig.from_options(values)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if not asyncio.run(serve(config)):
            _exit_now(errors)
    except RecordingFailed as error:
        _log.error("cuda_graphs_failed reason=%r: restarting without them", str(error))
        if errors is not None:
            errors.close()  # the reader of standard error ends with this program
        start_again(["--cuda-graphs=off"], config.security.identity.token)
    except (ExecutorError, SecurityUnusable, FilesUnusable) as error:
        # Names that come from files may hold anything.
        say_why_not("executor", printable(" ".join(str(error).split())))
        return 2
    except CannotListen as error:
        say_why_not("executor", error)
        return 1
    return 0


def _exit_now(errors: StandardError | None) -> NoReturn:
    """Ends the process at once, without Python's shutdown.

    A thread may be inside C++ code, in which a normal shutdown would abort.
    """
    logging.shutdown()
    if errors is not None:
        errors.close()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
