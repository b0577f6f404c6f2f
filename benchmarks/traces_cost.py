"""What traces cost a scheduler: CPU time for each request and for each step.

python -m benchmarks.traces_cost
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from benchmarks.metrics_cost import WatchedSteps
from scheduler_service.scheduler import RequestSubmitted
from scheduler_service.watching import Transition
from scheduler_service.watching.request_traces import RequestTraces
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_tracing import TraceConfig
from splitserve_tracing.tracing import Tracing

_NUM_ROWS = 64
_NUM_REQUESTS = 1000
_NUM_STEPS = 1000
_NUM_TRIES = 5


class _Dropped(SpanExporter):
    """Encoding for a collector is the work of another thread, and not in these numbers."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def traces(ratio: float) -> RequestTraces:
    """Of so many of all requests."""
    return RequestTraces(Tracing(TraceConfig("http://localhost:1", ratio), "bench", _Dropped()))


def us_per_request(ratio: float) -> float:
    """CPU time of a request from its arrival to its end, with two steps of one row."""
    watch, steps = traces(ratio), WatchedSteps(1, num_changes=1)
    for turn in steps.begin():
        watch.see(turn)
    message = api.GenerateRequest()

    def one(turns: list[Transition]) -> None:
        for turn in turns:
            if isinstance(turn.event, RequestSubmitted):
                request = turn.event.request
                watch.begin(request, request.request_id, message, None)
            watch.see(turn)

    return _us(one, [list(steps.step()) for _ in range(_NUM_TRIES * _NUM_REQUESTS)])


def us_per_step(num_traced: int) -> float:
    """CPU time of a step of 64 rows that get a token each; so many of them are traced."""
    watch, steps = traces(1.0), WatchedSteps(_NUM_ROWS)
    for number, turn in enumerate(steps.begin()):
        if isinstance(turn.event, RequestSubmitted) and number < num_traced:
            request = turn.event.request
            watch.begin(request, request.request_id, api.GenerateRequest(), None)
        watch.see(turn)
    steps_turns = [list(steps.step()) for _ in range(_NUM_TRIES * _NUM_STEPS)]

    def one(turns: list[Transition]) -> None:
        for turn in turns:
            watch.see(turn)

    return _us(one, steps_turns)


def _us(work: Callable[[list[Transition]], None], turns: list[list[Transition]]) -> float:
    """CPU time of `work` for each of `turns`; the best of some tries."""
    num_each, tries = len(turns) // _NUM_TRIES, []
    for number in range(_NUM_TRIES):
        before = time.thread_time()
        for each in turns[number * num_each : (number + 1) * num_each]:
            work(each)
        tries.append((time.thread_time() - before) / num_each * 1e6)
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
