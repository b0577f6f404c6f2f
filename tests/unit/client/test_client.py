from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import (
    AsyncClient,
    Choices,
    Client,
    DeadlineExceeded,
    Draining,
    Finish,
    FinishReason,
    Grammar,
    InvalidRequest,
    JsonSchema,
    Lark,
    ModelNotReady,
    QueueFull,
    Regex,
    RequestIdInUse,
    RequestUnknown,
    SamplingParams,
    ServerFault,
    ServerUnreachable,
    SplitserveError,
    TokenizerUnavailable,
    Tokens,
)
from splitserve_rpc.domain_error import DomainError
from tests.support.fakes.fake_generation import expected_tokens
from tests.support.fakes.fake_scheduler import Cut, FakeScheduler, start
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


@pytest.mark.parametrize("number", [0, 3])
async def test_generate_continues_when_it_was_not_read(
    client: AsyncClient, fake: FakeScheduler, number: int
) -> None:
    error = DomainError("STREAM_NOT_READ", "the stream held too much")
    fake.before_token = cut_at(number, error=error)  # type: ignore[assignment]

    token_ids, _ = await collect(client.generate(PROMPT, SamplingParams(seed=11, max_tokens=5)))

    assert token_ids == expected_tokens(PROMPT, 11, 5)
    assert len(fake.requests) == 2


async def test_generate_streams_tokens_and_finish_when_nothing_goes_wrong(
    client: AsyncClient,
) -> None:
    params = SamplingParams(seed=11, max_tokens=5)

    token_ids, finish = await collect(client.generate(PROMPT, params))

    assert token_ids == expected_tokens(PROMPT, 11, 5)
    assert finish.reason is FinishReason.LENGTH
    assert (finish.usage.num_prompt_tokens, finish.usage.num_output_tokens) == (3, 5)


async def test_generate_continues_where_it_was_when_the_stream_breaks_twice(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(3, 4)  # type: ignore[assignment]

    token_ids, _ = await collect(client.generate(PROMPT, SamplingParams(max_tokens=8)))

    seeds = {request.sampling_params.seed for request in fake.requests}
    assert len(seeds) == 1
    assert token_ids == expected_tokens(PROMPT, seeds.pop(), 8)
    assert [len(request.resume_token_ids) for request in fake.requests] == [0, 3, 3]
    assert len({request.request_id for request in fake.requests}) == 1


async def test_generate_starts_over_when_the_stream_breaks_before_the_first_token(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(0)  # type: ignore[assignment]
    params = SamplingParams(seed=1, max_tokens=2, num_prompt_logprobs=0)

    events = [event async for event in client.generate(PROMPT, params)]

    scores = [s.token_id for e in events if isinstance(e, Tokens) for s in e.prompt_logprobs]
    assert scores == PROMPT[1:]
    assert len(fake.requests) == 2


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


async def test_generate_aborts_its_own_stale_request_when_the_server_still_has_it(
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


async def test_generate_raises_when_the_server_notices_the_deadline(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.hold = asyncio.Event()

    with pytest.raises(DeadlineExceeded):
        await collect(client.generate(PROMPT, SamplingParams(max_tokens=3), timeout_s=0.05))


async def test_generate_survives_when_the_server_process_is_replaced(
    virtual_time: VirtualTime,
) -> None:
    first, second = FakeScheduler(), FakeScheduler()

    def hold_all_but_one(number: int) -> None:
        first.hold = asyncio.Event() if number > 0 else None

    first.before_token = hold_all_but_one
    running = await start(first)
    address = f"127.0.0.1:{running.port}"

    async with AsyncClient(address) as client:
        token_ids: list[int] = []
        async for event in client.generate(PROMPT, SamplingParams(seed=5, max_tokens=6)):
            if isinstance(event, Tokens):
                token_ids.extend(event.token_ids)
            if not second.requests:
                await running.server.stop(None)
                running = await start(second, address)

    await running.server.stop(None)
    assert token_ids == expected_tokens(PROMPT, 5, 6)
    assert len(second.requests) == 1


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


async def test_client_says_so_at_once_when_no_server_answers() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
            await client.get_model()


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


async def test_get_model_gives_the_model_when_it_is_ready(client: AsyncClient) -> None:
    model = await client.get_model()

    assert (model.name, model.max_model_len, model.eos_token_ids) == ("fake", 128, (1,))


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

    with pytest.raises(TokenizerUnavailable, match="name is not usable") as error:
        await client.get_tokenizer_files()

    assert str(error.value).isprintable()


async def test_list_executors_gives_pools_when_one_is_connected(client: AsyncClient) -> None:
    executors = await client.list_executors()

    (executor,) = executors.executors
    assert (executor.is_connected, executor.num_free_device_blocks) == (True, 60)
    assert (executors.num_unassigned_requests, executors.num_unfitting_requests) == (2, 1)


async def test_is_serving_is_what_the_health_service_says(fake: FakeScheduler) -> None:
    running = await start(fake)
    async with AsyncClient(f"127.0.0.1:{running.port}") as client:
        assert await client.is_serving()
        await running.set_serving(("",), False)
        assert not await client.is_serving()
    await running.server.stop(None)


async def test_sync_client_streams_when_it_runs_outside_asyncio(address: str) -> None:
    collected: list[Tokens | Finish] = []

    def work() -> None:
        with Client(address) as client:
            assert client.get_model().name == "fake"
            collected.extend(client.generate(PROMPT, SamplingParams(seed=2, max_tokens=3)))
            for _ in client.generate(PROMPT, SamplingParams(max_tokens=10**6)):
                break

    await asyncio.to_thread(work)

    tokens = [t for event in collected if isinstance(event, Tokens) for t in event.token_ids]
    assert tokens == expected_tokens(PROMPT, 2, 3)
    assert isinstance(collected[-1], Finish)


async def test_allowed_tokens_are_sent_when_there_are_any(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    params = SamplingParams(
        seed=1, max_tokens=1, allowed_token_ids=(4, 5), bad_words_token_ids=((6,), (7, 8))
    )
    await collect(client.generate(PROMPT, params))
    sent = fake.requests[0].sampling_params
    assert list(sent.allowed_token_ids) == [4, 5]
    assert [list(word.token_ids) for word in sent.bad_words_token_ids] == [[6], [7, 8]]


@pytest.mark.parametrize(
    ("grammar", "sent"),
    [
        (JsonSchema("{}"), api.Grammar(json_schema="{}")),
        (Regex("é+"), api.Grammar(regex="é+")),
        (Lark("start: /x/"), api.Grammar(lark="start: /x/")),
        (Choices(("yes", "no")), api.Grammar(choices=api.Choices(texts=["yes", "no"]))),
        (None, api.Grammar()),
    ],
)
async def test_grammar_is_sent_as_its_kind_when_there_is_one(
    client: AsyncClient, fake: FakeScheduler, grammar: Grammar | None, sent: api.Grammar
) -> None:
    await collect(client.generate(PROMPT, SamplingParams(max_tokens=1, grammar=grammar)))
    params = fake.requests[0].sampling_params
    assert params.HasField("grammar") == (grammar is not None)
    assert params.grammar == sent


async def test_grammar_is_kept_when_defaults_fill_the_rest() -> None:
    params = SamplingParams(grammar=Regex("x")).with_defaults(SamplingParams(top_k=9))
    assert params == SamplingParams(grammar=Regex("x"), top_k=9)


async def test_empty_list_of_allowed_tokens_is_refused_when_it_could_be_taken_for_all(
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
