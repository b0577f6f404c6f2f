"""Every refusal that the comments promise: gRPC code, reason, domain."""

import math
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

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


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (request_of([]), "PROMPT_EMPTY"),
        (request_of([1] * 100, max_tokens=1), "PROMPT_TOO_LONG"),
        (request_of([1, 1000], max_tokens=1), "TOKEN_OUT_OF_RANGE"),
        (request_of([1, -1], max_tokens=1), "TOKEN_OUT_OF_RANGE"),
        (
            pb.GenerateRequest(prompt_token_ids=[1], resume_token_ids=[1000]),
            "TOKEN_OUT_OF_RANGE",
        ),
        (request_of([1] * 70, max_tokens=1), "NEVER_FITS_KV_CACHE"),
        (request_of(PROMPT, num_logprobs=1), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, num_prompt_logprobs=1), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, presence_penalty=1), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, frequency_penalty=1), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, repetition_penalty=2), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, logit_bias={1: 1}), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, min_tokens=1, max_tokens=2), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, allowed_token_ids=[1]), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, bad_words_token_ids=[BAD_WORD]), "FEATURE_UNSUPPORTED"),
        (request_of(PROMPT, grammar=pb.Grammar(regex="x")), "SAMPLING_PARAMS_INVALID"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_generate_refuses_when_request_is_invalid(
    cluster: Driver, request_: pb.GenerateRequest, reason: str
) -> None:
    check(await cluster.client.refusal(request_), INVALID, reason)


BAD_PARAMS: list[dict[str, Param]] = [
    {"temperature": -0.1},
    {"logit_bias": {1: 101.0}},
    {"logit_bias": {1: math.inf}},
    {"logit_bias": {1: math.nan}},
    {"allowed_token_ids": [1, 1000]},
    {"allowed_token_ids": [1] * 16385},
    {"allowed_token_ids": [1], "logit_bias": {1: -math.inf}},
    {"bad_words_token_ids": [pb.TokenSequence()]},
    {"bad_words_token_ids": [pb.TokenSequence(token_ids=[1, -1])]},
    {"bad_words_token_ids": [pb.TokenSequence(token_ids=[1])] * 1025},
    {"bad_words_token_ids": [pb.TokenSequence(token_ids=[1] * 8193)]},
    {"logit_bias": dict.fromkeys(range(1000), 1.0) | dict.fromkeys(range(1000, 1025), 1.0)},
    {"min_tokens": 6, "max_tokens": 5},
    {"stop_token_ids": list(range(257))},
]


@pytest.mark.parametrize("params", BAD_PARAMS, ids=lambda params: next(iter(params)))
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
        {"top_k": 0},
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
    assert completion.tokens == expected_tokens(PROMPT, 4, 1, 2, 1000)


async def test_generate_refuses_when_request_id_is_in_use(full_cluster: Driver) -> None:
    (executor,) = full_cluster.executors
    executor.gate.clear()
    first = full_cluster.client.start(request_of(PROMPT, "twin", max_tokens=2))
    await full_cluster.wait_for_states(lambda states: states[0].num_running_requests == 1)
    error = await full_cluster.client.refusal(request_of(PROMPT, "twin", max_tokens=2))
    executor.gate.set()
    check(error, grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
    assert (await first.finish()).request_id == "twin"
    await full_cluster.client.generate(request_of(PROMPT, "twin", max_tokens=2))


async def test_generate_refuses_with_retry_info_when_queue_is_full(
    full_cluster: Driver,
) -> None:
    (executor,) = full_cluster.executors
    executor.gate.clear()
    running = full_cluster.client.start(request_of(PROMPT, max_tokens=2))
    await full_cluster.wait_for_states(lambda states: states[0].num_running_requests == 1)
    waiting = full_cluster.client.start(request_of(PROMPT, max_tokens=2))
    await full_cluster.wait_for_states(lambda states: states[0].num_waiting_requests == 1)
    error = await full_cluster.client.refusal(request_of(PROMPT, max_tokens=2))
    executor.gate.set()
    check(error, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error is not None
    assert error.retry_delay_s is not None
    assert error.retry_delay_s > 0
    await running.finish()
    await waiting.finish()


async def abort_error(client: StrangerClient, request_id: str) -> ErrorDetails | None:
    try:
        await client.abort(request_id)
    except grpc.aio.AioRpcError as error:
        return read_error(error)
    return None


async def test_abort_finds_nothing_when_request_is_unknown_or_finished(
    full_cluster: Driver,
) -> None:
    await full_cluster.client.generate(request_of(PROMPT, "done", max_tokens=1))
    for request_id in ("done", "never", ""):
        error = await abort_error(full_cluster.client, request_id)
        check(error, grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN")


async def test_generate_draws_request_ids_when_they_are_empty(full_cluster: Driver) -> None:
    first = await full_cluster.client.generate(request_of(PROMPT, max_tokens=1))
    second = await full_cluster.client.generate(request_of(PROMPT, max_tokens=1))
    assert first.request_id
    assert first.request_id != second.request_id


async def test_get_tokenizer_passes_files_on_when_executor_has_them(
    full_cluster: Driver,
) -> None:
    assert await full_cluster.client.get_tokenizer() == {"a.json": b"0123456789ab"}


async def test_get_tokenizer_refuses_when_executor_has_none(cluster: Driver) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.client.get_tokenizer()
    error = read_error(caught.value)
    check(error, grpc.StatusCode.NOT_FOUND, "TOKENIZER_UNAVAILABLE")


async def test_get_model_describes_what_executor_registered(full_cluster: Driver) -> None:
    info = full_cluster.executors[0].info.model
    answer = await full_cluster.client.get_model()
    # Its executors answer when they are told to, so whether there is progress is up to the test.
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
    )


async def test_calls_refuse_when_no_executor_has_registered() -> None:
    async with (
        running_scheduler() as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        client = StrangerClient(channel)
        for call in (client.generate(request_of(PROMPT)), client.get_model()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            code = grpc.StatusCode.FAILED_PRECONDITION
            check(read_error(caught.value), code, "MODEL_NOT_READY")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.get_tokenizer()
        check(read_error(caught.value), grpc.StatusCode.FAILED_PRECONDITION, "MODEL_NOT_READY")


async def test_streams_end_with_draining_when_scheduler_stops() -> None:
    executor = StrangerExecutor()
    async with running_cluster(executor) as cluster:
        generation = cluster.client.start(request_of(PROMPT, max_tokens=100, ignore_eos=True))
        await generation.read_until(1)
        executor.gate.clear()
        cluster.scheduler.terminate()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation.finish()
    check(read_error(caught.value), grpc.StatusCode.UNAVAILABLE, "DRAINING")
