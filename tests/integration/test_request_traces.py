"""Tests the spans of requests that a serving scheduler sends to a collector over OTLP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio
import pytest

from scheduler_service.callers import Admission, AllowAllCallers, Scope
from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler.values import PolicyConfig, PreemptionMode, Request
from scheduler_service.service import CallerChecks
from scheduler_service.streams import Keeping, Sink
from scheduler_service.watching.request_traces import RequestTraces
from splitserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from splitserve_client import (
    AsyncClient,
    Finish,
    RequestIdInUse,
    SamplingParams,
    SessionRequest,
    TraceContext,
)
from splitserve_common import context_fields
from splitserve_tracing import TraceConfig
from splitserve_tracing.tracing import Tracing
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.patience import PATIENCE_S, PATIENT_AT_CALLS
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process
from tests.support.processes.trace_collector import CollectedSpan, TraceCollector, trace_collector
from tests.support.security.credentials import KeyRing

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
ASKED = TraceContext(f"00-{TRACE_ID}-{PARENT_ID}-01", "vendor=1")
PROMPT = [1, 2, 3, 4, 5]
TWO_TOKENS = SamplingParams(seed=1, max_tokens=2)


@dataclass(frozen=True, slots=True)
class Traced:
    """A scheduler whose traces `collector` gets."""

    client: AsyncClient
    collector: TraceCollector
    traces: RequestTraces
    scheduler: SchedulerInProcess

    async def one_generate(self) -> tuple[CollectedSpan, list[CollectedSpan]]:
        """Waits for the span of the only traced request; returns it and all spans."""
        await self.collector.wait_for_names("generate")
        (whole,) = self.collector.named("generate")
        return whole, self.collector.spans


@asynccontextmanager
async def traced(
    *executors: FakeExecutor,
    sampling_ratio: float = 0.0,
    most_asked_per_s: float = 50.0,
    preemption_mode: str = "auto",
    callers: KeyRing | None = None,
    key: str | None = None,
) -> AsyncIterator[Traced]:
    async with trace_collector() as collector:
        trace_config = TraceConfig(collector.url, sampling_ratio, most_asked_per_s)
        tracing = Tracing(trace_config, "scheduler")
        traces = RequestTraces(tracing)
        async with (
            scheduler_in_process(
                *executors,
                config=ClusterConfig(
                    reconnect_timeout_s=0.1,
                    step_patience_s=PATIENCE_S,
                    policies=PolicyConfig(preemption_mode=PreemptionMode(preemption_mode)),
                ),
                watchers=[traces],
                traces=traces,
                callers=callers,
            ) as scheduler,
            AsyncClient(scheduler.address, replace(PATIENT_AT_CALLS, api_key=key)) as client,
        ):
            yield Traced(client, collector, traces, scheduler)
        tracing.close()


async def finish_of(request: SessionRequest) -> None:
    assert isinstance([event async for event in request][-1], Finish)


def children(spans: Sequence[CollectedSpan], parent: CollectedSpan) -> list[CollectedSpan]:
    found = [span for span in spans if span.parent_id == parent.span_id]
    return sorted(found, key=lambda span: span.start_ns)


async def test_log_lines_have_the_trace_of_their_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with traced(FakeExecutor()) as running:
        cluster, woken, admitted = running.scheduler.cluster, [], []
        submit = cluster.submit

        def watched(
            request: Request, sink: Sink, admission: Admission, keeping: Keeping | None
        ) -> None:
            # As executors are woken up by it, and plan steps for everybody.
            asyncio.get_running_loop().call_soon(lambda: woken.append(context_fields()))
            admitted.append(admission.trace_id)
            submit(request, sink, admission, keeping)

        monkeypatch.setattr(cluster, "submit", watched)
        alone = running.client.generate(PROMPT, SamplingParams(max_tokens=2), trace_context=ASKED)
        assert [event async for event in alone]

    assert admitted == [TRACE_ID]
    assert woken == [{}]


async def test_resumed_request_has_no_second_first_token() -> None:
    async with traced(FakeExecutor()) as running:
        params = SamplingParams(seed=1, max_tokens=9)
        rest = running.client.generate(
            PROMPT, params, trace_context=ASKED, resume_token_ids=[4, 5, 6, 7]
        )
        assert [event async for event in rest]
        generate, spans = await running.one_generate()

    assert generate.event_names == ["resumed", "assigned"]
    assert generate.events[0][1] == {"splitserve.num_resumed_tokens": 4}
    assert [span.name for span in children(spans, generate)] == ["queue", "resume", "decode"]


async def test_trace_has_queue_prefill_and_decode() -> None:
    async with traced(FakeExecutor()) as running:
        params = SamplingParams(seed=1, max_tokens=9)
        await running.client.complete(PROMPT, params, request_id="a", trace_context=ASKED)
        whole, spans = await running.one_generate()

    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert (whole.parent_id, whole.trace_state) == (PARENT_ID, "vendor=1")
    assert whole.attributes["splitserve.request_id"] == "a"
    assert whole.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert whole.attributes["gen_ai.usage.output_tokens"] == 9
    assert whole.attributes["splitserve.finish_reason"] == "length"
    assert not whole.is_error
    phases = children(spans, whole)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    queue, prefill, decode = phases
    assert whole.start_ns <= queue.start_ns <= queue.end_ns <= prefill.start_ns
    assert prefill.end_ns <= decode.start_ns <= decode.end_ns <= whole.end_ns
    assert whole.event_names == ["assigned", "first_token"]
    (step,) = children(spans, prefill)
    assert step.attributes["splitserve.request.num_tokens"] == len(PROMPT)
    assert step.attributes["splitserve.executor"] == prefill.attributes["splitserve.executor"]
    assert prefill.start_ns <= step.start_ns <= step.end_ns <= prefill.end_ns
    assert children(spans, decode) == []
    assert whole.attributes["splitserve.num_steps"] >= 2


async def test_trace_has_recovery_when_its_executor_is_lost() -> None:
    watch = StepWatch()
    executor = FakeExecutor(fault=watch)
    async with traced(executor) as running:
        params = SamplingParams(seed=1, max_tokens=30)
        watch.hold(after=3)
        async with aclosing(running.client.generate(PROMPT, params, trace_context=ASKED)) as events:
            await anext(events)
            await watch.wait_held()
            killing = asyncio.create_task(executor.kill())
            await running.scheduler.wait_connected(0)
            watch.release()
            await killing
            await executor.start()
            async for _ in events:
                pass
        whole, spans = await running.one_generate()

    phases = children(spans, whole)
    assert [span.name for span in phases] == ["queue", "prefill", "decode", "recovery", "decode"]
    assert [span.is_error for span in phases] == [False, False, True, False, False]
    assert whole.event_names == ["assigned", "first_token", "executor_lost", "assigned"]
    recovery = phases[3]
    assert recovery.event_names == ["began"]
    (step,) = children(spans, recovery)
    assert step.attributes["splitserve.request.num_tokens"] > len(PROMPT)
    assert whole.attributes["gen_ai.usage.output_tokens"] == 30


@pytest.mark.parametrize(("num_host_blocks", "mode"), [(0, "recompute"), (32, "swap")])
async def test_trace_says_why_a_request_was_preempted(num_host_blocks: int, mode: str) -> None:
    # 64 tokens in all: two requests of 45 do not fit to their end.
    executor = FakeExecutor(num_device_blocks=16, num_host_blocks=num_host_blocks)
    async with traced(executor, sampling_ratio=1.0, preemption_mode=mode) as running:
        params = SamplingParams(seed=1, max_tokens=40)
        await asyncio.gather(
            *(running.client.complete(PROMPT, params, request_id=each) for each in "ab")
        )
        await running.collector.wait_for(
            lambda spans: len([span for span in spans if span.name == "generate"]) == 2
        )
        spans = running.collector.spans

    preempted = [span for span in spans if "preempted" in span.event_names]
    assert preempted
    for whole in preempted:
        phases = children(spans, whole)
        names = [span.name for span in phases]
        assert names[:4] == ["queue", "prefill", "decode", "preempted"]
        assert names[-2:] == ["resume", "decode"]
        why = phases[3].attributes
        assert why["splitserve.preemption.mode"] == mode
        assert why["splitserve.preemption.cause"] == "blocks"
        assert all(
            earlier.end_ns <= later.start_ns for earlier, later in itertools.pairwise(phases)
        )


async def test_request_is_not_traced_when_its_caller_wants_none() -> None:
    unsampled = TraceContext(f"00-{TRACE_ID}-{PARENT_ID}-00")
    async with traced(FakeExecutor(), sampling_ratio=1.0) as running:
        await running.client.complete(PROMPT, TWO_TOKENS, trace_context=unsampled)
        await running.client.complete(PROMPT, TWO_TOKENS)
        _, spans = await running.one_generate()

    assert TRACE_ID not in {span.trace_id for span in spans}


async def test_trace_of_a_gateway_goes_on() -> None:
    keys = KeyRing()
    gateway, alice = keys.add("", Scope.GATEWAY), keys.add("a")
    params = SamplingParams(seed=1, max_tokens=2)
    async with (
        traced(FakeExecutor(), most_asked_per_s=0.0, callers=keys, key=gateway) as running,
        AsyncClient(
            running.scheduler.address, replace(PATIENT_AT_CALLS, api_key=alice)
        ) as stranger,
    ):
        other = TraceContext(f"00-{'a' * 32}-{PARENT_ID}-01")
        await stranger.complete(PROMPT, params, trace_context=other)
        async with stranger.session() as session:
            await finish_of(session.submit(PROMPT, params, trace_context=other))
        async with running.client.session() as session:
            for context in (TraceContext(f"00-{'b' * 32}-{PARENT_ID}-00"), ASKED):
                asked = session.submit(PROMPT, params, credential=alice, trace_context=context)
                await finish_of(asked)
        await running.collector.wait_for_names("generate")

    assert [span.trace_id for span in running.collector.named("generate")] == [TRACE_ID]


def test_nobody_is_a_gateway_when_callers_are_not_known() -> None:
    assert not CallerChecks(AllowAllCallers()).is_of_gateway("x")
    assert not CallerChecks(KeyRing()).is_of_gateway("")


async def test_request_is_not_traced_when_its_context_is_invalid() -> None:
    contexts = [
        TraceContext("x" * 100_000),
        TraceContext("00-" + "0" * 32 + "-" + "0" * 16 + "-01"),
        TraceContext("\x00é" * 20),
        TraceContext(f"ff-{TRACE_ID}-{PARENT_ID}-01"),
        TraceContext(f"00-{TRACE_ID}-{PARENT_ID}-01-more"),
        TraceContext(f"00-{TRACE_ID.upper()}-{PARENT_ID}-01"),
    ]
    async with traced(FakeExecutor()) as running:
        for context in (*contexts, ASKED):
            await running.client.complete(PROMPT, TWO_TOKENS, trace_context=context)
        whole, spans = await running.one_generate()

    assert {span.trace_id for span in spans} == {whole.trace_id} == {TRACE_ID}


async def test_metadata_of_a_call_may_have_its_trace() -> None:
    async with traced(FakeExecutor()) as running:
        metadata = (("traceparent", ASKED.traceparent), ("tracestate", ASKED.tracestate))
        async with grpc.aio.insecure_channel(running.scheduler.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            message = scheduler_pb2.GenerateRequest(prompt_token_ids=PROMPT)
            message.sampling_params.max_tokens = 2
            async for _ in stub.Generate(message, metadata=metadata):
                pass
        whole, _ = await running.one_generate()
        assert (whole.trace_id, whole.parent_id) == (TRACE_ID, PARENT_ID)


async def test_trace_state_is_left_out_when_it_is_too_long() -> None:
    async with traced(FakeExecutor()) as running:
        context = TraceContext(ASKED.traceparent, "vendor=" + "x" * 1000)
        await running.client.complete(PROMPT, TWO_TOKENS, trace_context=context)
        whole, _ = await running.one_generate()
        assert (whole.trace_id, whole.trace_state) == (TRACE_ID, "")


async def test_refused_request_has_a_span_with_its_reason() -> None:
    watch = StepWatch()
    async with traced(FakeExecutor(fault=watch)) as running:
        watch.hold(after=2)
        params = SamplingParams(seed=1, max_tokens=30)
        async with aclosing(running.client.generate(PROMPT, params, request_id="a")) as events:
            await anext(events)
            with pytest.raises(RequestIdInUse):
                await running.client.complete(PROMPT, params, request_id="a", trace_context=ASKED)
            watch.release()
            async for _ in events:
                pass
        whole, _ = await running.one_generate()

    assert whole.is_error
    assert whole.attributes["splitserve.refusal"] == "REQUEST_ID_IN_USE"


async def test_nothing_is_remembered_when_requests_have_ended() -> None:
    async with traced(FakeExecutor(), sampling_ratio=1.0) as running:
        for seed in range(5):
            await running.client.complete(PROMPT, SamplingParams(seed=seed, max_tokens=3))

        assert running.traces.num_open == 0
