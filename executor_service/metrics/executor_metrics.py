"""Metrics of an executor process, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from prometheus_client import GCCollector, ProcessCollector

from executor_service.service import ExecuteStreams, StepWorker
from executor_service.speculation import DraftTotals
from executor_service.steps import ExecutorInfo
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_contract import CONTRACT_MAJOR, CONTRACT_MINOR
from splitserve_metrics import (
    EXECUTOR_METRICS,
    Instruments,
    LiveFamily,
    MetricsAddress,
    MetricsListener,
    Page,
    counted_refusals,
)

_ROW_OK = pb.ROW_STATUS_OK
_PREFIX = "STEP_STATUS_"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Components to read once a model is loaded."""

    info: ExecutorInfo
    worker: StepWorker
    streams: ExecuteStreams
    drafts: DraftTotals | None


class ExecutorMetrics:
    """Metrics of one executor. Call all methods in the event loop.

    `answered` must be called with each step result, `refused` with each refused call.
    """

    def __init__(self, address: MetricsAddress) -> None:
        """Raises FilesUnusable."""
        self._loaded: _Loaded | None = None
        made = self._instruments = Instruments(EXECUTOR_METRICS)
        ProcessCollector(registry=made.registry)
        GCCollector(registry=made.registry)
        steps = made.counter("splitserve_executor_steps_total")
        self._steps = {
            number: steps.labels(name.removeprefix(_PREFIX).lower())
            for name, number in pb.StepStatus.items()
        }
        durations = made.histogram("splitserve_executor_step_duration_seconds")
        self._queue, self._move, self._forward, self._sample = (
            durations.labels(phase) for phase in ("queue", "move", "forward", "sample")
        )
        self._rows = made.histogram("splitserve_executor_step_rows")
        self._tokens = made.counter("splitserve_executor_output_tokens_total")
        self._failures = made.counter("splitserve_executor_row_failures_total")
        self.refused = counted_refusals(made.counter("splitserve_executor_calls_refused_total"))
        self._listener = MetricsListener(address, self.page)

    async def serve(self) -> str:
        """Starts to answer scrapes; returns the address. Raises CannotListen."""
        return await self._listener.start()

    async def close(self) -> None:
        """Stops answering scrapes."""
        await self._listener.close()

    def watch(
        self,
        info: ExecutorInfo,
        worker: StepWorker,
        streams: ExecuteStreams,
        drafts: DraftTotals | None = None,
    ) -> None:
        """Adds the metrics of a loaded model. `drafts`: None if it has no draft model."""
        self._loaded = _Loaded(info, worker, streams, drafts)

    def answered(self, result: pb.StepResult) -> None:
        """Counts the result of a batch."""
        self._steps[result.status].inc()
        if result.status != pb.STEP_STATUS_OK:
            return
        timings = result.timings
        self._queue.observe(timings.queue_us / 1e6)
        self._move.observe(timings.move_us / 1e6)
        self._forward.observe(timings.forward_us / 1e6)
        self._sample.observe(timings.sample_us / 1e6)
        tokens = np.frombuffer(result.sampled_token_ids, "<i4")
        column = result.sampled_offsets
        self._rows.observe(len(column) // 4 - 1 if column else len(tokens))
        self._tokens.inc(int(np.count_nonzero(tokens >= 0)))
        if result.row_statuses:
            statuses = np.frombuffer(result.row_statuses, np.uint8)
            failed = (statuses != _ROW_OK) & (statuses != pb.ROW_STATUS_NOT_SAMPLED)
            self._failures.inc(int(np.count_nonzero(failed)))

    def page(self) -> Page:
        """Returns the metrics of this moment."""
        return Page(self._instruments.registry, self._state())

    def _state(self) -> list[LiveFamily]:
        if self._loaded is None:
            return []
        loaded, made = self._loaded, self._instruments
        info, worker = loaded.info, loaded.worker
        what = made.family("splitserve_executor_info")
        contract = f"{CONTRACT_MAJOR}.{CONTRACT_MINOR}"
        what.add_metric([info.model.name, info.model.digest, info.model.dtype, contract], 1)
        fastest = made.family("splitserve_executor_compute_is_fastest")
        fastest.add_metric([info.compute], int(not info.slow_compute_reason))
        in_flight = made.family("splitserve_executor_steps_in_flight")
        in_flight.add_metric([], worker.num_in_flight)
        running = made.family("splitserve_executor_step_running_seconds")
        running.add_metric([], worker.describe(info).step_running_ms / 1e3)
        streams = made.family("splitserve_executor_streams")
        streams.add_metric([], loaded.streams.num_open)
        pools = made.family("splitserve_executor_pool_blocks")
        pools.add_metric(["device"], info.num_device_blocks)
        pools.add_metric(["host"], info.num_host_blocks)
        guesses = made.family("splitserve_executor_draft_tokens_total")
        if loaded.drafts is not None:
            guesses.add_metric(["accepted"], loaded.drafts.num_accepted)
            guesses.add_metric(["rejected"], loaded.drafts.num_rejected)
        return [what, fastest, in_flight, running, streams, pools, guesses]
