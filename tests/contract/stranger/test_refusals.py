"""Refusals of requests on the wire: gRPC code, reason, domain; what is asked about the model.

Each range and limit is tried in `test_sampling_parameters.py` and in tests of the scheduler.
"""

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.stranger.client import (
    ErrorDetails,
    Param,
    StrangerClient,
    read_error,
    request_of,
)
from tests.contract.stranger.executor import ExecutorConfig, StrangerExecutor
from tests.contract.stranger.process import Driver, running_cluster, running_scheduler
from tests.contract.stranger.truth import expected_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT = [1, 2, 3]
BAD_WORD = pb.TokenSequence(token_ids=[5] * 8)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Driver]:
    """A pool of 64 tokens, a model of 100 tokens, no optional feature."""
    config = ExecutorConfig(num_device_blocks=16, max_model_len=100, features=())
    async with running_cluster(StrangerExecutor(config)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full_cluster() -> AsyncIterator[Driver]:
    """All features, and one request at a time."""
    config = ExecutorConfig(
        tokenizer_files={"a.json": b"0123456789ab"},
        # One of them is out of range.
        default_sampling_params=executor_pb2.SamplingParams(temperature=0.5, top_k=20, top_p=7),
    )
    executor = StrangerExecutor(config)
    async with running_cluster(executor, max_num_seqs=1, max_num_waiting=1) as running:
        yield running


def check(error: ErrorDetails | None, code: grpc.StatusCode, reason: str) -> None:
    assert error is not None, "accepted"
    assert (error.code, error.reason, error.domain) == (code, reason, "splitserve")


async def refusal_of(call: object) -> ErrorDetails:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return read_error(caught.value)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (request_of([]), "PROMPT_EMPTY"),
        (request_of([1] * 100, max_tokens=1), "PROMPT_TOO_LONG"),
        (request_of([1, 1000], max_tokens=1), "TOKEN_OUT_OF_RANGE"),
        (pb.GenerateRequest(prompt_token_ids=[1], resume_token_ids=[1000]), "TOKEN_OUT_OF_RANGE"),
        (request_of([1] * 70, max_tokens=1), "NEVER_FITS_KV_CACHE"),
        (request_of(PROMPT, num_logprobs=1), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, repetition_penalty=2), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, bad_words_token_ids=[BAD_WORD]), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, grammar=pb.Grammar(regex="x")), "SAMPLING_PARAMS_INVALID"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_generate_refuses_when_request_is_invalid(
    cluster: Driver, request_: pb.GenerateRequest, reason: str
) -> None:
    check(await cluster.client.refusal(request_), INVALID, reason)


TOO_MANY_BIASES = dict.fromkeys(range(1025), 1.0)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": TOO_MANY_BIASES},
        {"allowed_token_ids": [1, 1000]},
        {"allowed_token_ids": [1] * 16385},
        {"allowed_token_ids": [1], "logit_bias": {1: float("-inf")}},
        {"bad_words_token_ids": [pb.TokenSequence()]},
        {"bad_words_token_ids": [pb.TokenSequence(token_ids=[1, -1])]},
        {"bad_words_token_ids": [pb.TokenSequence(token_ids=[1])] * 1025},
        {"bad_words_token_ids": [pb.TokenSequence(token_ids=[1] * 8193)]},
        {"min_tokens": 6, "max_tokens": 5},
        {"stop_token_ids": list(range(257))},
    ],
    ids=lambda params: next(iter(params)),
)
async def test_generate_names_parameter_when_it_is_out_of_range(
    full_cluster: Driver, params: dict[str, Param]
) -> None:
    error = await full_cluster.client.refusal(request_of(PROMPT, **params))
    check(error, INVALID, "SAMPLING_PARAMS_INVALID")
    assert error is not None
    assert next(iter(params)) in error.message


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 100.0, "top_k": 1, "top_p": 1.0, "min_p": 1.0},
        {"logit_bias": dict.fromkeys(range(999), -100.0), "min_tokens": 2, "min_p": 0.0},
        {"num_logprobs": 20, "num_prompt_logprobs": 0, "ignore_eos": True},
        {"top_k": -1},
        {"allowed_token_ids": [*range(1000)] * 16 + [1] * 384},
        {"bad_words_token_ids": [BAD_WORD] * 1024},
    ],
    ids=lambda params: next(iter(params)),
)
async def test_generate_accepts_when_parameters_are_at_their_bounds(
    full_cluster: Driver, params: dict[str, Param]
) -> None:
    request = request_of(PROMPT, max_tokens=2, seed=4, **params)
    completion = await full_cluster.client.generate(request)
    assert completion.tokens == expected_tokens(PROMPT, 4, 1, 2)


async def test_generate_refuses_an_id_in_use_and_a_full_queue(full_cluster: Driver) -> None:
    client, (executor,) = full_cluster.client, full_cluster.executors
    executor.gate.clear()
    running = client.start(request_of(PROMPT, "twin", max_tokens=2))
    await full_cluster.wait_for_states(lambda states: states[0].num_running_requests == 1)
    twin = await client.refusal(request_of(PROMPT, "twin", max_tokens=2))
    waiting = client.start(request_of(PROMPT, max_tokens=2))
    await full_cluster.wait_for_states(lambda states: states[0].num_waiting_requests == 1)
    full = await client.refusal(request_of(PROMPT, max_tokens=2))
    executor.gate.set()
    check(twin, grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
    check(full, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert full is not None
    assert full.retry_delay_s is not None
    assert full.retry_delay_s > 0
    assert (await running.finish()).request_id == "twin"
    # An id that was left out is drawn; one that is free may be used again.
    assert (await waiting.finish()).request_id not in ("", "twin")
    await client.generate(request_of(PROMPT, "twin", max_tokens=2))
    for request_id in ("twin", "never", ""):
        error = await refusal_of(client.abort(request_id))
        check(error, grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN")


async def test_get_tokenizer_passes_files_on_when_executor_has_them(
    cluster: Driver, full_cluster: Driver
) -> None:
    assert await full_cluster.client.get_tokenizer() == {"a.json": b"0123456789ab"}
    error = await refusal_of(cluster.client.get_tokenizer())
    check(error, grpc.StatusCode.NOT_FOUND, "TOKENIZER_UNAVAILABLE")


async def test_get_model_describes_what_executor_registered(full_cluster: Driver) -> None:
    info = full_cluster.executors[0].info.model
    answer = await full_cluster.client.get_model()
    # Depends on whether another test holds the executor.
    answer.ClearField("readiness")
    assert answer == pb.GetModelResponse(
        name=info.name,
        digest=info.digest,
        dtype=info.dtype,
        vocab_size=1000,
        max_model_len_tokens=200,
        default_sampling_params=pb.SamplingParams(temperature=0.5, top_k=20),
        max_message_bytes=256 * 1024 + 4 * 256 * 4,
        max_num_sequences=1,
        max_kept_duration=Duration(seconds=600),
    )


async def test_calls_refuse_when_no_executor_has_registered() -> None:
    async with (
        running_scheduler() as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        client = StrangerClient(channel)
        calls = client.generate(request_of(PROMPT)), client.get_model(), client.get_tokenizer()
        for call in calls:
            error = await refusal_of(call)
            check(error, grpc.StatusCode.FAILED_PRECONDITION, "MODEL_NOT_READY")


async def test_streams_end_with_draining_when_scheduler_stops() -> None:
    executor = StrangerExecutor()
    async with running_cluster(executor) as cluster:
        generation = cluster.client.start(request_of(PROMPT, max_tokens=100, ignore_eos=True))
        await generation.read_until(1)
        executor.gate.clear()
        cluster.scheduler.terminate()
        error = await refusal_of(generation.finish())
    check(error, grpc.StatusCode.UNAVAILABLE, "DRAINING")
