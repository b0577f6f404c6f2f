"""What traces cost a scheduler: CPU time for each request and for each step.

python -m benchmarks.traces_cost
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from benchmarks.metrics_cost import decode_step
from scheduler_service.core.notes import Began
from scheduler_service.core.plan import NewRow
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.tracing.request_traces import RequestTraces
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_tracing.trace_config import TraceConfig
from splitserve_tracing.tracing import Tracing

_ADDRESS = "127.0.0.1:1"
_NUM_ROWS = 64
_NUM_REQUESTS = 2000
_NUM_STEPS = 5000
_NUM_TRIES = 5


class _Dropped(SpanExporter):
    """Encoding for a collector is the work of another thread, and not in these numbers."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def traces(ratio: float) -> RequestTraces:
    """Of so many of all requests."""
    return RequestTraces(Tracing(TraceConfig("http://localhost:1", ratio), "bench", _Dropped()))


def request_of(key: int) -> Request:
    """With a `client_key`."""
    request = Request.create(f"r{key}", [1], SamplingParams(), arrival=key, seed=key)
    request.client_key = key
    return request


def us_per_request(ratio: float) -> float:
    """From its arrival to its end, with the step of its first token."""
    watch = traces(ratio)
    plan, outcome, events = decode_step(1)
    message = api.GenerateRequest()

    def one(key: int) -> None:
        request = request_of(key)
        watch.begin(request, request.request_id, message, None)
        watch.request_given(request, _ADDRESS, None)
        watch.step_sent(_ADDRESS, replace(plan, notes=(Began(request, 1, 0, 0),)), 1)
        watch.step_answered(_ADDRESS, outcome)
        watch.tokens_delivered(events)
        request.finish_reason = FinishReason.LENGTH
        watch.request_ended(request)

    def nothing(key: int) -> None:
        request = request_of(key)
        replace(plan, notes=(Began(request, 1, 0, 0),))

    return _us(one, _NUM_REQUESTS) - _us(nothing, _NUM_REQUESTS)


def us_per_step(num_traced: int) -> float:
    """Of a step of 64 rows that get a token each; so many of them are traced."""
    watch = traces(1.0)
    plan, outcome, events = decode_step(_NUM_ROWS)
    for key in range(num_traced):
        request = request_of(key)
        watch.begin(request, request.request_id, api.GenerateRequest(), None)
        first = NewRow(request.sequence, key, plan.work.token_ids, plan.work.token_ids)
        began = replace(plan, notes=(Began(request, 1, 0, 0),), new_rows=(first,))
        watch.step_sent(_ADDRESS, began, 1)
    watch.tokens_delivered(events)

    def one(_: int) -> None:
        watch.step_sent(_ADDRESS, plan, 1)
        watch.step_answered(_ADDRESS, outcome)
        watch.tokens_delivered(events)

    return _us(one, _NUM_STEPS)


def _us(work: Callable[[int], None], times: int) -> float:
    tries = []
    for _ in range(_NUM_TRIES):
        before = time.thread_time()
        for key in range(times):
            work(key)
        tries.append((time.thread_time() - before) / times * 1e6)
    return min(tries)


def main() -> int:
    """Prints a line for each number."""
    for ratio in (0.0, 0.01, 1.0):
        sys.stdout.write(f"{ratio:5.0%} traced: {us_per_request(ratio):6.1f} us a request\n")
    for num_traced in (0, 1, 8, 64):
        sys.stdout.write(
            f"{num_traced:3} of {_NUM_ROWS} rows traced: {us_per_step(num_traced):6.1f} us a step\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
