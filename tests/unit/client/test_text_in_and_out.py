"""Text in and text out: single calls and batches."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from splitserve_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    End,
    FinishReason,
    InvalidRequest,
    MapResult,
    Piece,
    ProgressLine,
    Prompt,
    SamplingParams,
)
from splitserve_contract import DomainError
from tests.support.fakes.fake_scheduler import VOCAB_SIZE, FakeScheduler, expected_tokens
from tests.support.fakes.running_schedulers import TEMPLATE, FakeServer
from tests.support.models import tiny_tokenizers

PARAMS = SamplingParams(seed=5, max_tokens=4)
TOOL_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{{ tools[0].word }}"


@pytest.fixture
def fake() -> FakeScheduler:
    files = {
        "tokenizer.json": tiny_tokenizers.words(VOCAB_SIZE).to_str().encode(),
        "chat_template.jinja": TEMPLATE.encode(),
        "additional_chat_templates/tool_use.jinja": TOOL_TEMPLATE.encode(),
    }
    return FakeScheduler(tokenizer_files=files)


def words(token_ids: list[int], *, continues: bool) -> str:
    text = " ".join(f"t{token_id}" for token_id in token_ids)
    return " " + text if continues else text


def answer(prompt: int, num_tokens: int = 4) -> str:
    return words(expected_tokens([prompt], 5, num_tokens), continues=True)


async def collect(client: AsyncClient, prompts: object, **options: object) -> list[MapResult]:
    results = client.map(prompts, PARAMS, show_progress=False, **options)  # type: ignore[arg-type]
    async with aclosing(results):
        return [result async for result in results]


# -- one -------------------------------------------------------------------------------------------


async def test_complete_text_continues_the_text_when_it_is_a_string(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    generation = await client.complete_text("t3 t4", PARAMS)

    assert list(fake.requests[0].prompt_token_ids) == [3, 4]
    assert generation.text == words(expected_tokens([3, 4], 5, 4), continues=True)
    assert generation.completions[0].reason is FinishReason.LENGTH
    assert generation.usage.num_output_tokens == 4


async def test_chat_uses_the_template_for_tools(client: AsyncClient, fake: FakeScheduler) -> None:
    messages = [{"role": "user", "content": "t3"}]

    plain = await client.chat(messages, PARAMS)
    await client.chat(messages, PARAMS, tools=[{"word": "t7"}], stop_strings=["t99"])

    assert [list(request.prompt_token_ids) for request in fake.requests] == [[3, 9], [3, 7]]
    assert plain.text == words(expected_tokens([3, 9], 5, 4), continues=False)


async def test_stream_text_pieces_add_up_when_n_is_3(
    client: AsyncClient,
) -> None:
    params = SamplingParams(seed=5, max_tokens=4, n=3)
    texts = ["", "", ""]
    async for part in client.stream_text(Prompt("t3", is_raw=True), params):
        if isinstance(part, Piece):
            texts[part.index] += part.text
        else:
            assert isinstance(part, End)

    generation = await client.complete_text("t3", params)

    assert [completion.text for completion in generation.completions] == texts
    assert len(set(texts)) == 3


# -- many ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False])
async def test_map_gives_each_result_once_in_the_asked_order(
    client: AsyncClient, in_order: bool
) -> None:
    numbers = range(2, 60)

    results = await collect(
        client, [f"t{number}" for number in numbers], max_running=7, in_order=in_order
    )

    indexes = [result.index for result in results]
    assert (indexes if in_order else sorted(indexes)) == list(range(58))
    assert [result.text for result in results] == [answer(numbers[index]) for index in indexes]


async def test_map_reads_few_prompts_when_results_are_not_taken(
    client: AsyncClient,
) -> None:
    num_read = 0

    def prompts() -> Iterator[str]:
        nonlocal num_read
        while True:
            num_read += 1
            yield "t3"

    results = client.map(prompts(), PARAMS, max_running=3, show_progress=False)
    async with aclosing(results):
        assert (await anext(results)).index == 0
        for _ in range(100):
            await asyncio.sleep(0)

    assert 1 <= num_read <= 3 * 6


async def test_map_fails_one_item_when_it_alone_is_refused(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def before_request(request: object) -> None:
        if list(fake.requests[-1].prompt_token_ids) == [6]:
            raise DomainError("PROMPT_TOO_LONG", "too long")

    fake.before_request = before_request

    results = await collect(client, ["t5", "t6", [{"role": "user", "content": {1}}], "t7"])

    assert [type(result.error).__name__ for result in results] == [
        "NoneType", "InvalidRequest", "ChatTemplateFailed", "NoneType",
    ]  # fmt: skip
    assert (results[0].text, results[3].text) == (answer(5), answer(7))
    with pytest.raises(InvalidRequest):
        _ = results[1].text


@pytest.mark.parametrize("reason", ["QUEUE_FULL", "QUOTA_EXCEEDED"])
async def test_map_waits_when_the_queue_is_full(
    client: AsyncClient, fake: FakeScheduler, reason: str
) -> None:
    def before_request(request: object) -> None:
        if len(fake.requests) in (2, 3):
            raise DomainError(reason, "not now")

    fake.before_request = before_request

    results = await collect(client, ["t5", "t6", "t7"], max_running=1)

    assert [result.text for result in results] == [answer(5), answer(6), answer(7)]
    assert len(fake.requests) == 5


async def test_map_ends_its_requests_when_it_is_left_early(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    before = asyncio.all_tasks()
    results = client.map(["t3"] * 50, PARAMS, max_running=2, show_progress=False)
    async with aclosing(results):
        await anext(results)

    left = {task for task in asyncio.all_tasks() - before if "splitserve_client" in repr(task)}
    assert left == set()
    assert len(fake.requests) < 50


async def test_map_refuses_options_when_they_are_none_of_a_batch(client: AsyncClient) -> None:
    with pytest.raises(ValueError, match="max_running is 0; allowed: at least 1"):
        await collect(client, ["t3"], max_running=0)
    with pytest.raises(ValueError, match="id of its own"):
        await collect(client, ["t3"], request_id="x")


async def test_map_gives_an_item_up_when_its_time_is_over(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.hold = asyncio.Event()

    (result,) = await collect(client, ["t3"], timeout_s=0.01)

    assert isinstance(result.error, DeadlineExceeded)


def test_sync_client_has_the_same_calls() -> None:
    server = FakeServer()
    try:
        with Client(server.address) as client:
            text = client.complete_text("t3", PARAMS).text
            pieces = list(client.stream_text("t3", PARAMS))
            chat = client.chat([{"role": "user", "content": "t3"}], PARAMS)
            mapped = list(client.map(["t3", "t4"], PARAMS, show_progress=False))
    finally:
        server.close()

    assert text == answer(3) == "".join(p.text for p in pieces if isinstance(p, Piece))
    assert chat.text == words(expected_tokens([3, 9], 5, 4), continues=False)
    assert [result.text for result in mapped] == [answer(3), answer(4)]


def test_progress_shows_count_and_rate() -> None:
    now_s, file = 0.0, io.StringIO()
    with ProgressLine(4, show=True, clock=lambda: now_s, file=file) as line:
        for _ in range(2):
            now_s += 1.0
            line.add(10)
    silent = io.StringIO()
    with ProgressLine(4, show=None, clock=lambda: now_s, file=silent) as line:
        line.add(1)
        line.say("look out")

    assert file.getvalue().endswith("[############............] 2/4 (1.0/s, 10 tokens/s)\n")
    assert silent.getvalue() == "look out\n"
