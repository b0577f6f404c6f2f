"""`/v1/completions` through a gateway, a scheduler process and a fake executor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from splitserve_client import SamplingParams
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/completions"
PROMPT = "the quick fox jumps"
Json = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    async with running_gateway(text_executor(tmp_path_factory.mktemp("files"))) as running:
        yield running


def tokens_of(
    gateway: RunningGateway, params: SamplingParams, prompt: str = PROMPT
) -> list[list[int]]:
    prompt_token_ids = gateway.tokenizer.encode(prompt)
    completions = expected_completions(prompt_token_ids, params, vocab_size=406)
    return [list(completion.token_ids) for completion in completions]


def text_after(gateway: RunningGateway, token_ids: Sequence[int], prompt: str = PROMPT) -> str:
    """What `token_ids` add to the text of the prompt."""
    prompt_token_ids = gateway.tokenizer.encode(prompt)
    before = gateway.tokenizer.decode(prompt_token_ids)
    text = gateway.tokenizer.decode([*prompt_token_ids, *token_ids])
    assert text.startswith(before)
    return text[len(before) :]


def joined(events: Sequence[Json], num_choices: int = 1) -> list[str]:
    texts = [""] * num_choices
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


async def both(gateway: RunningGateway, **body: object) -> tuple[Json, list[Json]]:
    """The answer at once, and streamed; asserts that both say the same."""
    whole = await gateway.post(PATH, **body)
    events = await gateway.stream(PATH, **body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert joined(events, len(texts)) == texts
    ends = {
        choice["index"]: (choice["finish_reason"], choice["stop_reason"])
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    }
    assert [ends[c["index"]] for c in whole["choices"]] == [
        (c["finish_reason"], c["stop_reason"]) for c in whole["choices"]
    ]
    return whole, events


async def test_text_is_of_the_expected_tokens_when_n_is_2(gateway: RunningGateway) -> None:
    expected = tokens_of(gateway, SamplingParams(seed=5, max_tokens=40, n=2))
    whole, _ = await both(gateway, prompt=PROMPT, seed=5, max_tokens=40, n=2)
    assert [c["text"] for c in whole["choices"]] == [text_after(gateway, t) for t in expected]
    assert [c["index"] for c in whole["choices"]] == [0, 1]
    assert [c["finish_reason"] for c in whole["choices"]] == ["length", "length"]
    assert whole["usage"]["prompt_tokens"] == len(gateway.tokenizer.encode(PROMPT))
    assert whole["usage"]["completion_tokens"] == 80


async def test_max_tokens_is_16_when_it_is_absent(gateway: RunningGateway) -> None:
    answer = await gateway.post(PATH, prompt=PROMPT)
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("is_included", [False, True])
async def test_text_ends_at_a_stop_string_across_tokens(
    gateway: RunningGateway, is_included: bool
) -> None:
    (token_ids,) = tokens_of(gateway, SamplingParams(seed=7, max_tokens=60))
    text = text_after(gateway, token_ids)
    boundary = len(text_after(gateway, token_ids[:30]))
    stop = text[boundary - 2 : boundary + 2]
    first = text.index(stop)
    whole, events = await both(
        gateway,
        prompt=PROMPT,
        seed=7,
        max_tokens=60,
        stop=["never seen", stop],
        include_stop_str_in_output=is_included,
    )
    (choice,) = whole["choices"]
    assert choice["text"] == text[: first + len(stop) * is_included]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert whole["usage"]["completion_tokens"] <= 32
    assert joined(events)[0] == choice["text"]


async def test_usage_comes_last_when_it_is_asked_for(gateway: RunningGateway) -> None:
    body = {"prompt": PROMPT, "seed": 3, "max_tokens": 5}
    options = {"include_usage": True}
    *events, last = await gateway.stream(PATH, **body, stream_options=options)
    assert last["choices"] == []
    whole = await gateway.post(PATH, **body)
    cached = last["usage"].pop("prompt_tokens_details")
    assert whole["usage"].pop("prompt_tokens_details").keys() == cached.keys() == {"cached_tokens"}
    assert last["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)
    options["continuous_usage_stats"] = True
    events = await gateway.stream(PATH, **body, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_cached_tokens_are_counted_when_a_prompt_comes_again(gateway: RunningGateway) -> None:
    body = {"prompt": "return x + 1 " * 20, "user": "cached"}
    first = await gateway.post(PATH, **body, max_tokens=2)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = await gateway.post(PATH, **body, max_tokens=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    # A stop string ends it here; the scheduler still says what it took.
    text = (await gateway.post(PATH, **body, max_tokens=30, seed=1))["choices"][0]["text"]
    for more in ({}, {"n": 2}):
        stopped = await gateway.post(PATH, **body, **more, max_tokens=300, seed=1, stop=[text[5]])
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for other in ({"user": "another"}, {"cache_salt": "salt"}):
        answer = await gateway.post(PATH, **{**body, **other})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        '{"prompt": NaN}',
        '{"prompt": "a", "temperature": NaN}',
        '{"prompt": "a", "temperature": 1e999}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
        '{"prompt": "a", "metadata": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"prompt": ' + "[" * 100_000,
        '{"prompt": ' + "[[1]," * 2000 + "[1]" + "]" * 2001 + "}",
    ],
)
async def test_body_is_refused_when_it_is_no_request(gateway: RunningGateway, body: str) -> None:
    headers = {"content-type": "application/json"}
    response = await gateway.http.post(PATH, content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


# -- `/tokenize`, `/detokenize` and `/v1/models` ---------------------------------------------------


async def test_tokens_are_those_of_the_tokenizer_and_lead_back(gateway: RunningGateway) -> None:
    for text in ("the fox, Grüße 🦊", "the fox, Grüße 🦊" * 500):
        answer = await gateway.post("/tokenize", prompt=text, return_token_strs=True)
        assert answer["tokens"] == gateway.tokenizer.encode(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 1024
        assert answer["token_strs"][0] == "the"
        back = await gateway.post("/detokenize", tokens=answer["tokens"])
        assert back == {"prompt": text}


async def test_special_tokens_are_shown_unless_they_are_to_be_skipped(
    gateway: RunningGateway,
) -> None:
    tokens = [0, *gateway.tokenizer.encode("fox"), 1]
    assert (await gateway.post("/detokenize", tokens=tokens))["prompt"] == "<s>fox</s>"
    answer = await gateway.post("/detokenize", tokens=tokens, skip_special_tokens=True)
    assert answer["prompt"] == "fox"
