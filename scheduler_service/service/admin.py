"""AdminService: lists and drains executors, and explains requests and the waiting queue."""

from __future__ import annotations

import time
from pathlib import Path

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from scheduler_service.audit import Audit, NoAudit, OperatorCalled
from scheduler_service.driver import Driver
from scheduler_service.executors import MAX_TIMEOUT_S
from scheduler_service.journal import software_version
from scheduler_service.scheduler import ExecutorState
from scheduler_service.service.caller_checks import CallerNames
from scheduler_service.streams import encode_adapter
from scheduler_service.watching import LifeRecorder, explain, explain_queue
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import admin_pb2, admin_pb2_grpc
from splitserve_contract import CONTRACT_MAJOR, CONTRACT_MINOR, DomainError


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Implements AdminService."""

    def __init__(
        self,
        cluster: Driver,
        names: CallerNames,
        audit: Audit | None = None,
        drain_timeout_s: float = 10.0,
        recorder: LifeRecorder | None = None,
    ) -> None:
        """Keeps the parts that the methods use.

        `names`: names of callers for the audit log. `audit` None: no audit log. `drain_timeout_s`:
        used if DrainExecutor names no timeout. `recorder`: history of requests for Explain, None if
        none is kept.
        """
        self._cluster = cluster
        self._drain_timeout_s = drain_timeout_s
        self._names = names
        self._audit = audit or NoAudit()
        self._recorder = recorder

    async def ListExecutors(
        self, request: admin_pb2.ListExecutorsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListExecutorsResponse:
        """Returns the state of all executors, and how many requests no executor has yet."""
        name = self._names.of_call(context)
        self._audit.record(OperatorCalled("ListExecutors", context.peer(), name))
        cluster = self._cluster
        engines = cluster.executors
        taking = [engine for engine in engines if engine.takes_requests]
        num_unfitting = cluster.scheduler.num_unfitting if taking else 0
        # Requests that wait for any executor are shown in equal parts at the executors.
        num_shared = cluster.scheduler.num_waiting - num_unfitting
        parts = dict(zip(taking, _equal_parts(num_shared, len(taking)), strict=True))
        states = [
            admin_pb2.ExecutorState(
                executor=info,
                connected=engine.is_connected,
                num_waiting_requests=engine.engine.num_waiting + parts.get(engine, 0),
                num_running_requests=engine.engine.num_running_requests,
                num_free_device_blocks=_num_free_blocks(engine, info),
                num_steps=engine.engine.num_steps,
                num_preemptions=engine.engine.num_preemptions,
                num_swapped_requests=engine.engine.num_swapped,
                num_free_host_blocks=engine.engine.num_free_host_blocks,
                num_cached_device_blocks=engine.engine.num_cached_blocks,
                draining=engine.is_draining,
                failing=engine.is_failing,
                withdrawn=engine.is_withdrawn,
            )
            for engine in engines
            for info in [cluster.info_of(engine.address)]
        ]
        now = Timestamp()
        now.GetCurrentTime()
        return admin_pb2.ListExecutorsResponse(
            executors=states,
            now=now,
            software_version=software_version(),
            contract_version=executor.ContractVersion(major=CONTRACT_MAJOR, minor=CONTRACT_MINOR),
            num_unassigned_requests=num_unfitting if taking else cluster.scheduler.num_waiting,
            num_unfitting_requests=num_unfitting,
        )

    async def DrainExecutor(
        self, request: admin_pb2.DrainExecutorRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.DrainExecutorResponse:
        """Drains an executor, and answers when the executor is removed."""
        name = self._names.of_call(context)
        self._audit.record(OperatorCalled("DrainExecutor", context.peer(), name))
        timeout_s = self._drain_timeout_s
        if request.HasField("timeout"):
            timeout_s = read_timeout_s(request.timeout)
        drained = await self._cluster.drain_executor(request.address, timeout_s)
        return admin_pb2.DrainExecutorResponse(
            num_moved_requests=drained.num_moved, lost=drained.is_lost
        )

    async def UndrainExecutor(
        self, request: admin_pb2.UndrainExecutorRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UndrainExecutorResponse:
        """Takes back an executor that drains or was drained."""
        name = self._names.of_call(context)
        self._audit.record(OperatorCalled("UndrainExecutor", context.peer(), name))
        self._cluster.undrain_executor(request.address)
        return admin_pb2.UndrainExecutorResponse()

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadAdapterResponse:
        """Registers an adapter, after its files were read and an executor has loaded it."""
        self._audit.record(
            OperatorCalled("LoadAdapter", context.peer(), self._names.of_call(context))
        )
        loaded = await self._cluster.adapters.load(
            request.name,
            Path(request.path),
            replace=request.replace,
            load_ahead=self._cluster.load_ahead,
        )
        return admin_pb2.LoadAdapterResponse(adapter=encode_adapter(loaded))

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadAdapterResponse:
        """Removes an adapter from those that requests may name."""
        self._audit.record(
            OperatorCalled("UnloadAdapter", context.peer(), self._names.of_call(context))
        )
        self._cluster.adapters.unload(request.name)
        return admin_pb2.UnloadAdapterResponse()

    async def Explain(
        self, request: admin_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ExplainResponse:
        """Returns what happened to a request; an empty response if no history is kept."""
        name = self._names.of_call(context)
        self._audit.record(OperatorCalled("Explain", context.peer(), name))
        if self._recorder is None:
            return admin_pb2.ExplainResponse()
        wall_offset_ns = time.time_ns() - self._recorder.now_ns
        heads = self._cluster.scheduler.heads()
        return explain(self._recorder, request.request_id, heads, wall_offset_ns)

    async def ExplainQueue(
        self, request: admin_pb2.ExplainQueueRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ExplainQueueResponse:
        """Returns why the requests at the head of the waiting queue wait."""
        name = self._names.of_call(context)
        self._audit.record(OperatorCalled("ExplainQueue", context.peer(), name))
        cluster = self._cluster
        return explain_queue(
            cluster.scheduler.heads(),
            cluster.scheduler.num_waiting,
            sum(engine.takes_requests for engine in cluster.executors),
            cluster.name_of,
        )


def _num_free_blocks(state: ExecutorState, info: executor.ExecutorInfo) -> int:
    """Returns the number of free device blocks; all are, where rows have none."""
    if state.config.is_uncached:
        return info.num_device_blocks
    return state.engine.num_free_blocks


def _equal_parts(total: int, num_parts: int) -> list[int]:
    """Divides `total` into equal integer parts; the first ones get one more of the remainder."""
    return [(total + num_parts - 1 - index) // num_parts for index in range(num_parts)]


# -- Drain timeouts --------------------------------------------------------------------------------

_NS_PER_S = 1e9


def read_timeout_s(timeout: Duration) -> float:
    """Returns a drain timeout in seconds. Raises DomainError(DRAIN_TIMEOUT_INVALID)."""
    timeout_s = timeout.seconds + timeout.nanos / _NS_PER_S
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        message = f"timeout is {timeout_s:g} s; allowed: 0 to {MAX_TIMEOUT_S:g}"
        raise DomainError("DRAIN_TIMEOUT_INVALID", message)
    return timeout_s
