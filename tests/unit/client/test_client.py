"""Calls of the client: resumption, retries, errors, and what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    Finish,
    Generation,
    InvalidRequest,
    ModelNotReady,
    QueueFull,
    Regex,
    RequestFailed,
    RequestIdInUse,
    RequestUnknown,
    SamplingParams,
    SchedulingParams,
    ServerFault,
    ServerUnreachable,
    SplitserveError,
    TokenizerUnavailable,
    Tokens,
)
from splitserve_contract import DomainError
from tests.support.fakes.fake_scheduler import Cut, Failed, FakeScheduler, expected_tokens, start
from tests.support.processes.patience import PATIENCE_S
from tests.unit.client.conftest import VirtualTime

PROMPT = [3, 4, 5]


def cut_at(*numbers: int, error: DomainError | None = None) -> object:
    def before_token(number: int) -> None:
        if number in numbers:
            raise Cut if error is None else Cut(error)

    return before_token


async def collect(events: AsyncIterator[Tokens | Finish]) -> tuple[list[int], Finish]:
    token_ids: list[int] = []
    async for event in events:
        if isinstance(event, Finish):
            return token_ids, event
        token_ids.extend(event.token_ids)
    raise AssertionError("no finish")


@pytest.mark.parametrize("error", [None, DomainError("STREAM_NOT_READ", "it held too much")])
async def test_generate_continues_where_it_was_when_the_stream_breaks_twice(
    client: AsyncClient, fake: FakeScheduler, error: DomainError | None
) -> None:
    fake.before_token = cut_at(3, 4, error=error)  # type: ignore[assignment]

    token_ids, _ = await collect(client.generate(PROMPT, SamplingParams(max_tokens=8)))

    seeds = {request.sampling_params.seed for request in fake.requests}
    assert len(seeds) == 1
    assert token_ids == expected_tokens(PROMPT, seeds.pop(), 8)
    assert [len(request.resume_token_ids) for request in fake.requests] == [0, 3, 3]
    assert len({request.request_id for request in fake.requests}) == 1


@pytest.mark.parametrize("reason", ["MODEL_NOT_READY", "QUEUE_FULL", "DRAINING"])
async def test_generate_tries_again_when_a_successor_is_not_up_yet(
    client: AsyncClient, fake: FakeScheduler, reason: str
) -> None:
    fake.before_token = cut_at(2)  # type: ignore[assignment]

    def before_request(request: object) -> None:
        if len(fake.requests) in (2, 3):
            raise DomainError(reason, "not now")

    fake.before_request = before_request

    token_ids, _ = await collect(client.generate(PROMPT, SamplingParams(seed=7, max_tokens=4)))

    assert token_ids == expected_tokens(PROMPT, 7, 4)
    assert len(fake.requests) == 4


async def test_generate_aborts_its_stale_request_when_id_is_in_use(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(2)  # type: ignore[assignment]

    def before_request(request: object) -> None:
        if len(fake.requests) == 2:
            raise DomainError("REQUEST_ID_IN_USE", "in use")

    fake.before_request = before_request

    await collect(client.generate(PROMPT, SamplingParams(max_tokens=4), request_id="mine"))

    assert fake.aborted == ["mine"]


async def test_generate_waits_longer_each_time_when_attempts_keep_failing(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    fake.before_token = cut_at(*range(1, 8))  # type: ignore[assignment]

    await collect(client.generate(PROMPT, SamplingParams(max_tokens=3)))

    assert virtual_time.pauses_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])


async def test_generate_gives_up_when_the_server_does_not_come_back(
    address: str, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    fake.before_token = cut_at(*range(1, 1000))  # type: ignore[assignment]

    async with AsyncClient(address, virtual_time.config(give_up_after_s=30)) as client:
        with pytest.raises(ServerUnreachable):
            await collect(client.generate(PROMPT, SamplingParams(max_tokens=3)))

    assert 25 < sum(virtual_time.pauses_s) <= 30


async def test_generate_keeps_the_deadline_when_it_resumes(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    fake.before_token = cut_at(*range(1, 1000))  # type: ignore[assignment]

    with pytest.raises(DeadlineExceeded):
        await collect(client.generate(PROMPT, SamplingParams(max_tokens=3), timeout_s=10))

    assert sum(virtual_time.pauses_s) == pytest.approx(10)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("PROMPT_EMPTY", InvalidRequest),
        ("SAMPLING_PARAMS_INVALID", InvalidRequest),
        ("REQUEST_ID_IN_USE", RequestIdInUse),
        ("QUEUE_FULL", QueueFull),
        ("MODEL_NOT_READY", ModelNotReady),
        ("DRAINING", Draining),
        ("INVARIANT_BROKEN", ServerFault),
        ("SCHEDULING_PARAMS_INVALID", InvalidRequest),
        ("FEATURE_UNSUPPORTED", InvalidRequest),
    ],
)
async def test_generate_raises_by_reason_when_the_request_is_refused(
    client: AsyncClient, fake: FakeScheduler, reason: str, kind: type[SplitserveError]
) -> None:
    def before_request(request: object) -> None:
        raise DomainError(reason, "no", 1.5 if reason == "QUEUE_FULL" else None)

    fake.before_request = before_request

    with pytest.raises(kind) as caught:
        await collect(client.generate(PROMPT))

    assert caught.value.reason == reason
    assert caught.value.retry_delay_s == (1.5 if reason == "QUEUE_FULL" else None)
    assert len(fake.requests) == 1


async def test_generate_ends_the_call_when_its_iterator_is_closed(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    async with aclosing(client.generate(PROMPT, SamplingParams(max_tokens=10**6))) as events:
        async for _ in events:
            break

    await asyncio.wait_for(fake.ended.wait(), PATIENCE_S)


@pytest.mark.parametrize("port", ["65536", "99999", "9" * 30])
async def test_client_refuses_a_port_that_there_is_not(port: str) -> None:
    with pytest.raises(ServerUnreachable, match="its port is above 65535"):
        AsyncClient(f"127.0.0.1:{port}")


async def test_abort_raises_when_the_request_is_unknown(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    await client.abort("known")

    with pytest.raises(RequestUnknown):
        await client.abort("unknown")
    assert fake.aborted == ["known"]


async def test_get_tokenizer_files_joins_chunks_when_a_file_has_many(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.tokenizer_files = {"tokenizer.json": b"x" * 2500, "chat_template.jinja": b"y"}

    assert await client.get_tokenizer_files() == fake.tokenizer_files


async def test_get_tokenizer_raises_when_there_is_none(client: AsyncClient) -> None:
    with pytest.raises(TokenizerUnavailable):
        await client.get_tokenizer()


async def test_get_tokenizer_raises_when_a_file_name_has_control_characters(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.tokenizer_files = {"tokenizer.json": b"{}", "x\x1b[2J": b"y"}

    with pytest.raises(TokenizerUnavailable, match="is invalid") as error:
        await client.get_tokenizer_files()

    assert str(error.value).isprintable()


async def test_is_serving_is_what_the_health_service_says(fake: FakeScheduler) -> None:
    running = await start(fake)
    async with AsyncClient(f"127.0.0.1:{running.port}") as client:
        assert await client.is_serving()
        await running.set_serving(("",), False)
        assert not await client.is_serving()
    await running.server.stop(None)


async def test_sync_client_streams_when_it_runs_outside_asyncio(address: str) -> None:
    collected: list[Tokens | Finish] = []
    completed: list[Generation] = []

    def work() -> None:
        with Client(address) as client:
            assert client.get_model().name == "fake"
            params = SamplingParams(seed=2, max_tokens=3)
            collected.extend(client.generate(PROMPT, params))
            completed.append(client.complete(PROMPT, params))
            for _ in client.generate(PROMPT, SamplingParams(max_tokens=10**6)):
                break

    await asyncio.to_thread(work)

    tokens = [t for event in collected if isinstance(event, Tokens) for t in event.token_ids]
    assert tokens == list(completed[0].token_ids) == expected_tokens(PROMPT, 2, 3)
    assert isinstance(collected[-1], Finish)


async def test_grammar_is_kept_when_defaults_fill_the_rest() -> None:
    params = SamplingParams(grammar=Regex("x")).with_defaults(SamplingParams(top_k=9))
    assert params == SamplingParams(grammar=Regex("x"), top_k=9)


async def test_empty_allowed_token_ids_are_refused(
    client: AsyncClient,
) -> None:
    with pytest.raises(ValueError, match="allowed_token_ids is empty"):
        await collect(client.generate(PROMPT, SamplingParams(allowed_token_ids=())))


async def test_recommended_params_are_only_used_when_a_caller_asks(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.default_sampling_params = api.SamplingParams(
        temperature=0.5, top_k=9, grammar=api.Grammar(regex="nobody recommends that")
    )
    recommended = (await client.get_model()).default_sampling_params
    assert recommended == SamplingParams(temperature=0.5, top_k=9)
    own = SamplingParams(seed=1, max_tokens=1, top_k=0)
    for params in (own, own.with_defaults(recommended)):
        await collect(client.generate(PROMPT, params))
    plain, filled = (request.sampling_params for request in fake.requests)
    assert not plain.HasField("temperature")
    assert (filled.temperature, filled.top_k, filled.max_tokens) == (0.5, 0, 1)


SCHEDULING = SchedulingParams(
    priority=-5,
    tenant="someone",
    deadline_s=2.25,
    adapter="poet",
    cache_salt="salt",
    bypass_prefix_cache=True,
    num_public_prefix_tokens=3,
    target_itl_ms=40,
)


async def submit(client: AsyncClient, way: str, scheduling: SchedulingParams | None) -> None:
    params = SamplingParams(max_tokens=2)
    if way == "generate":
        events = client.generate(
            PROMPT, params, scheduling=scheduling, encoder_token_ids=[8, 9] if scheduling else ()
        )
        await collect(events)
        return
    async with client.session() as session:
        stream = session.submit(
            PROMPT, params, scheduling=scheduling, encoder_token_ids=[8, 9] if scheduling else ()
        )
        await collect(stream)


@pytest.mark.parametrize("way", ["generate", "session"])
async def test_client_sends_every_scheduling_parameter_when_given(
    client: AsyncClient, fake: FakeScheduler, way: str
) -> None:
    await submit(client, way, SCHEDULING)

    (sent,) = fake.requests
    assert (sent.priority, sent.tenant, sent.adapter) == (-5, "someone", "poet")
    assert sent.deadline.ToTimedelta().total_seconds() == 2.25
    assert (sent.cache_salt, sent.bypass_prefix_cache) == ("salt", True)
    assert (sent.num_public_prefix_tokens, sent.target_itl_ms) == (3, 40)
    assert list(sent.encoder_token_ids) == [8, 9]


@pytest.mark.parametrize("way", ["generate", "session"])
async def test_client_sends_no_scheduling_parameter_when_none_is_given(
    client: AsyncClient, fake: FakeScheduler, way: str
) -> None:
    await submit(client, way, None)

    assert [field.name for field, _ in fake.requests[0].ListFields()] == [
        "request_id",
        "prompt_token_ids",
        "sampling_params",
    ]


async def test_client_sends_the_remaining_deadline_when_stream_breaks(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    fake.before_token = cut_at(1)  # type: ignore[assignment]

    await submit(client, "generate", SCHEDULING)

    first, second = (sent.deadline.ToTimedelta().total_seconds() for sent in fake.requests)
    assert first - second == pytest.approx(sum(virtual_time.pauses_s))
    assert fake.requests[1].adapter == "poet"


@pytest.mark.parametrize("way", ["generate", "session"])
@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("DEADLINE_UNREACHABLE", DeadlineUnreachable),
        ("KV_CACHE_EXHAUSTED", RequestFailed),
        ("ROW_FAILED", RequestFailed),
    ],
)
async def test_client_raises_by_reason_when_an_accepted_request_fails(
    client: AsyncClient,
    fake: FakeScheduler,
    way: str,
    reason: str,
    kind: type[SplitserveError],
) -> None:
    def before_token(number: int) -> None:
        raise Failed(reason)

    fake.before_token = before_token

    with pytest.raises(RequestFailed) as caught:
        await submit(client, way, SCHEDULING)

    assert (type(caught.value), caught.value.reason) == (kind, reason)
    assert len(fake.requests) == 1
