"""Tests requests that a scheduler refuses while another one runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import duration_pb2

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_client import (
    Generation,
    InvalidRequest,
    RequestIdInUse,
    SamplingParams,
    SplitserveError,
    error_of_failure,
)
from splitserve_rpc import failure_of
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_NUM_SEQS = 8
PROMPT = [3, 4, 5]
UNDISTURBED = SamplingParams(seed=8, max_tokens=40, n=3)
SAMPLING, SCHEDULING = "SAMPLING_PARAMS_INVALID", "SCHEDULING_PARAMS_INVALID"
BEAMS = api.BeamSearch(width=4)
SHORT = {"max_tokens": 4}


@dataclass(frozen=True, slots=True)
class Running:
    """A service whose `busy` request is in the middle of its tokens until `watch` releases it."""

    service: FakeService
    watch: StepWatch
    stub: scheduler_pb2_grpc.SchedulerServiceStub
    busy: asyncio.Task[Generation]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    """At the end the busy request has what it would have had alone."""
    watch = StepWatch()
    async with (
        fake_service(FakeExecutor(fault=watch), max_num_seqs=MAX_NUM_SEQS) as service,
        grpc.aio.insecure_channel(service.scheduler.address) as channel,
    ):
        watch.hold(after=10)
        completing = service.client.complete(PROMPT, UNDISTURBED, request_id="busy")
        busy = asyncio.create_task(completing)
        await watch.wait_held()
        yield Running(service, watch, scheduler_pb2_grpc.SchedulerServiceStub(channel), busy)
        watch.release()
        assert (await busy).completions == expected_completions(PROMPT, UNDISTURBED)
        await service.wait_idle()


def sampled(**params: object) -> api.GenerateRequest:
    sampling_params = api.SamplingParams(**(SHORT | params))  # type: ignore[arg-type]
    return api.GenerateRequest(prompt_token_ids=PROMPT, sampling_params=sampling_params)


def with_beams(**params: object) -> api.GenerateRequest:
    return sampled(beam_search=BEAMS, **params)


def scheduled(n: int = 1, **fields: object) -> api.GenerateRequest:
    sampling_params = api.SamplingParams(n=n, max_tokens=4)
    return api.GenerateRequest(
        prompt_token_ids=PROMPT,
        sampling_params=sampling_params,
        **fields,  # type: ignore[arg-type]
    )


def resumed(*indexes: int, token: int = 1, **params: object) -> api.GenerateRequest:
    request = sampled(**params)
    for index in indexes:
        request.resume_sequences.add(index=index, token_ids=[token])
    return request


def both_ways_resumed() -> api.GenerateRequest:
    request = resumed(0, n=2)
    request.resume_token_ids.append(1)
    return request


def duration(seconds: int, nanos: int = 0) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=seconds, nanos=nanos)


# Name, request, reason, what the message names.
CASES: tuple[tuple[str, api.GenerateRequest, str, str], ...] = (
    ("beams with logprobs", with_beams(num_logprobs=1), SAMPLING, "num_logprobs"),
    ("beams, min_p", with_beams(min_p=0.5), SAMPLING, "min_p"),
    ("beams, presence", with_beams(presence_penalty=1), SAMPLING, "presence_penalty"),
    ("beams, frequency", with_beams(frequency_penalty=1), SAMPLING, "frequency_penalty"),
    (
        "length penalty",
        sampled(beam_search=api.BeamSearch(width=2, length_penalty=10.5)),
        SAMPLING,
        "length_penalty",
    ),
    (
        "unknown early stopping",
        sampled(beam_search=api.BeamSearch(width=2, early_stopping=9)),  # type: ignore[arg-type]
        SAMPLING,
        "early_stopping",
    ),
    (
        "beams beyond max_num_seqs",
        sampled(beam_search=api.BeamSearch(width=9)),
        SAMPLING,
        "max_num_seqs 8",
    ),
    ("n beyond its range", sampled(n=129), SAMPLING, "n is 129"),
    ("best_of beyond max_num_seqs", sampled(n=1, best_of=9), SAMPLING, "max_num_seqs 8"),
    ("n that never fits", sampled(n=8, max_tokens=100), "NEVER_FITS_KV_CACHE", "8 sequences"),
    ("deadline of 0", scheduled(deadline=duration(0)), SCHEDULING, "deadline"),
    ("deadline before now", scheduled(deadline=duration(0, -1)), SCHEDULING, "deadline"),
    ("priority too small", scheduled(priority=-101), SCHEDULING, "priority is -101"),
    ("priority too large", scheduled(priority=101), SCHEDULING, "priority is 101"),
    ("priority least of all", scheduled(priority=-(2**31)), SCHEDULING, "priority"),
    ("target of 0", scheduled(target_itl_ms=0), SCHEDULING, "target_itl_ms is 0; allowed: 1 to"),
    ("target below 0", scheduled(target_itl_ms=-5), SCHEDULING, "target_itl_ms is -5"),
    ("target too large", scheduled(target_itl_ms=60_001), SCHEDULING, "target_itl_ms is 60001"),
    ("tenant too long", scheduled(tenant="t" * 129), SCHEDULING, "tenant"),
    ("cache salt too long", scheduled(cache_salt="s" * 129), SCHEDULING, "cache_salt"),
    (
        "public prefix below 0",
        scheduled(num_public_prefix_tokens=-1),
        SCHEDULING,
        "public_prefix_tokens is -1",
    ),
    ("adapter too long", scheduled(adapter="a" * 129), SCHEDULING, "adapter"),
    ("adapter", scheduled(adapter="a"), "FEATURE_UNSUPPORTED", "adapters"),
    ("encoder", scheduled(encoder_token_ids=[1]), "FEATURE_UNSUPPORTED", "cross_attention"),
    ("resumed n", scheduled(n=2, resume_token_ids=[1]), SAMPLING, "resume_sequences"),
    ("resumed index twice", resumed(1, 1, n=2), SAMPLING, "index 1"),
    ("resumed index beyond n", resumed(2, n=2), SAMPLING, "index 2"),
    ("resumed index below 0", resumed(-1, n=2), SAMPLING, "index -1"),
    ("resumed both ways", both_ways_resumed(), SAMPLING, "resume_token_ids"),
    ("resumed best_of", resumed(0, n=1, best_of=2), SAMPLING, "resume"),
    ("resumed beams", resumed(0, beam_search=BEAMS), SAMPLING, "resume"),
    ("resumed beyond max_tokens of 0", resumed(0, n=2, max_tokens=0), SAMPLING, "max_tokens"),
    ("resumed token beyond 127", resumed(1, token=128, n=2), "TOKEN_OUT_OF_RANGE", "128"),
    ("resumed token below 0", resumed(1, token=-1, n=2), "TOKEN_OUT_OF_RANGE", "-1"),
)


async def generate_error(running: Running, request: api.GenerateRequest) -> SplitserveError:
    """What the client makes of how a call is refused."""
    call = running.stub.Generate(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error_of_failure(failure_of(caught.value))


async def session_error(running: Running, request: api.GenerateRequest) -> api.RequestError:
    """How a request is refused in a session, in which another one then runs as ever."""
    call = running.stub.Session()
    submit = api.SessionSubmit(handle=7, request=request)
    await call.write(api.SessionRequest(submit=submit))
    message = await call.read()
    assert not message.handles
    (event,) = message.events
    assert event.handle == 7
    assert event.WhichOneof("event") == "rejected"
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    rejected = event.rejected
    assert isinstance(rejected, api.RequestError)
    return rejected


@pytest.mark.parametrize(
    ("request_", "reason", "named"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
async def test_request_is_refused_when_it_makes_no_sense(
    running: Running, request_: api.GenerateRequest, reason: str, named: str
) -> None:
    error = await generate_error(running, request_)
    assert isinstance(error, InvalidRequest)
    assert error.reason == reason
    assert named in error.message
    rejected = await session_error(running, request_)
    assert (rejected.reason, rejected.message) == (reason, error.message)
    assert not rejected.HasField("retry_delay")


async def test_request_is_refused_when_an_unfinished_one_has_its_id(running: Running) -> None:
    client = running.service.client
    with pytest.raises(RequestIdInUse):
        await client.complete(PROMPT, request_id="busy")
    request = scheduled(request_id="busy")
    rejected = await session_error(running, request)
    assert rejected.reason == "REQUEST_ID_IN_USE"
    assert not running.busy.done()
