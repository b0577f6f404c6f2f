"""`/v1/completions` through a gateway, a scheduler process and a fake executor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from splitserve_client import BeamSearch, EarlyStopping, SamplingParams
from tests.support.fakes.fake_logprobs import fake_logprob
from tests.support.fakes.fake_truth import expected_completions
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


async def test_text_is_that_of_the_expected_tokens_when_n_is_2(gateway: RunningGateway) -> None:
    expected = tokens_of(gateway, SamplingParams(seed=5, max_tokens=40, n=2))
    whole, _ = await both(gateway, prompt=PROMPT, seed=5, max_tokens=40, n=2)
    assert [c["text"] for c in whole["choices"]] == [text_after(gateway, t) for t in expected]
    assert [c["index"] for c in whole["choices"]] == [0, 1]
    assert [c["finish_reason"] for c in whole["choices"]] == ["length", "length"]
    assert whole["usage"]["prompt_tokens"] == len(gateway.tokenizer.encode(PROMPT))
    assert whole["usage"]["completion_tokens"] == 80


async def test_prompts_are_answered_in_their_order_when_there_are_several(
    gateway: RunningGateway,
) -> None:
    prompts = ["the fox", "the dog jumps", "brown"]
    params = SamplingParams(seed=5, max_tokens=12, n=2)
    expected = [text_after(gateway, t, p) for p in prompts for t in tokens_of(gateway, params, p)]
    whole, _ = await both(gateway, prompt=prompts, seed=5, max_tokens=12, n=2)
    assert [c["text"] for c in whole["choices"]] == expected
    as_tokens = [gateway.tokenizer.encode(prompt) for prompt in prompts]
    again = await gateway.post(PATH, prompt=as_tokens, seed=5, max_tokens=12, n=2)
    assert again["choices"] == whole["choices"]
    assert again["usage"]["prompt_tokens"] == sum(map(len, as_tokens))
    one = await gateway.post(PATH, prompt_token_ids=as_tokens[1], seed=5, max_tokens=12)
    assert one["choices"][0]["text"] == expected[2]


async def test_max_tokens_is_16_when_it_is_absent(gateway: RunningGateway) -> None:
    answer = await gateway.post(PATH, prompt=PROMPT)
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("is_included", [False, True])
async def test_text_ends_at_a_stop_string_when_it_lies_across_tokens(
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


async def test_stop_token_is_no_part_of_the_text_unless_asked_for(gateway: RunningGateway) -> None:
    (token_ids,) = tokens_of(gateway, SamplingParams(seed=7, max_tokens=60))
    stop = next(t for t in token_ids[9:] if gateway.tokenizer.decode([t]).strip().isalpha())
    end = token_ids.index(stop)
    body = {"prompt": PROMPT, "seed": 7, "max_tokens": 60, "stop_token_ids": [stop]}
    whole, _ = await both(gateway, **body)
    (choice,) = whole["choices"]
    assert choice["text"] == text_after(gateway, token_ids[:end])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    whole, _ = await both(gateway, **body, include_stop_str_in_output=True)
    assert whole["choices"][0]["text"] == text_after(gateway, token_ids[: end + 1])


async def test_logprobs_are_those_of_the_tokens_when_asked_for(gateway: RunningGateway) -> None:
    (token_ids,) = tokens_of(gateway, SamplingParams(seed=3, max_tokens=30))
    body = {"prompt": PROMPT, "seed": 3, "max_tokens": 30, "logprobs": 2}
    whole, events = await both(gateway, **body)
    (choice,) = whole["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [fake_logprob(t) for t in token_ids]
    assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    assert all(
        top[token] >= logprob
        for top, token, logprob in zip(
            logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"], strict=True
        )
    )
    starts = [len(text_after(gateway, token_ids[:i]).rstrip("\ufffd")) for i in range(30)]
    exact = [len(text_after(gateway, token_ids[:i])) for i in range(30)]
    for offset, least, most in zip(logprobs["text_offset"], starts, exact, strict=True):
        assert least <= offset <= most
    streamed: dict[str, list[object]] = {}
    for event in events:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            streamed.setdefault(name, []).extend(values)
    assert streamed == logprobs
    named = await gateway.post(PATH, **body, return_tokens_as_token_ids=True)
    assert named["choices"][0]["logprobs"]["tokens"] == [f"token_id:{t}" for t in token_ids]


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echo_begins_with_the_prompt_and_its_scores(
    gateway: RunningGateway, max_tokens: int
) -> None:
    prompt = gateway.tokenizer.encode(PROMPT)
    (token_ids,) = tokens_of(gateway, SamplingParams(seed=3, max_tokens=3))
    token_ids = token_ids[:max_tokens]
    body = {"prompt": PROMPT, "seed": 3, "max_tokens": max_tokens, "echo": True, "n": 2}
    whole, _ = await both(gateway, **body, logprobs=1)
    for choice in whole["choices"]:
        assert choice["text"].startswith(PROMPT)
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + max_tokens
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert all(logprob is not None for logprob in logprobs["token_logprobs"][1:])
        names = [gateway.tokenizer.decode([token_id]) for token_id in prompt]
        assert logprobs["tokens"][: len(prompt)] == names
        assert logprobs["text_offset"][: len(prompt)] == [
            len("".join(names[:number])) for number in range(len(prompt))
        ]
    assert whole["choices"][0]["text"] == PROMPT + text_after(gateway, token_ids)
    assert whole["usage"]["completion_tokens"] == 2 * max_tokens
    plain = await gateway.post(PATH, **body)
    assert plain["choices"][0]["text"] == whole["choices"][0]["text"]


async def test_prompt_logprobs_and_token_ids_are_told_when_asked_for(
    gateway: RunningGateway,
) -> None:
    prompt = gateway.tokenizer.encode(PROMPT)
    (token_ids,) = tokens_of(gateway, SamplingParams(seed=3, max_tokens=3))
    body = {"prompt": PROMPT, "seed": 3, "max_tokens": 3}
    answer = await gateway.post(PATH, **body, prompt_logprobs=1, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == token_ids
    first, *scores = choice["prompt_logprobs"]
    assert first is None
    for token_id, score in zip(prompt[1:], scores, strict=True):
        entry = score[str(token_id)]
        assert entry.keys() == {"logprob", "rank", "decoded_token"}
        assert entry["decoded_token"] == gateway.tokenizer.decode([token_id])
    events = await gateway.stream(PATH, **body, return_token_ids=True)
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == token_ids


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


async def test_the_best_come_first_when_best_of_is_above_n(gateway: RunningGateway) -> None:
    params = SamplingParams(seed=3, max_tokens=8, n=2, best_of=5)
    expected = [text_after(gateway, t) for t in tokens_of(gateway, params)]
    whole, _ = await both(gateway, prompt=PROMPT, seed=3, max_tokens=8, n=2, best_of=5)
    assert [c["text"] for c in whole["choices"]] == expected


async def test_beams_are_those_of_the_search_when_there_is_one(gateway: RunningGateway) -> None:
    beams = BeamSearch(3, 0.5, EarlyStopping.HEURISTIC)
    expected = tokens_of(gateway, SamplingParams(max_tokens=6, n=3, beam_search=beams))
    fields = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "max_tokens": 6}
    whole, _ = await both(gateway, prompt=PROMPT, **fields)
    assert [c["text"] for c in whole["choices"]] == [text_after(gateway, t) for t in expected]


async def test_truncated_prompt_keeps_its_end(gateway: RunningGateway) -> None:
    prompt = gateway.tokenizer.encode(PROMPT)
    body = {"seed": 3, "max_tokens": 5}
    cut = await gateway.post(PATH, **body, prompt=PROMPT, truncate_prompt_tokens=2)
    same = await gateway.post(PATH, **body, prompt=prompt[-2:])
    assert cut["choices"] == same["choices"]
    assert cut["usage"]["prompt_tokens"] == 2


async def test_bias_is_by_token_id_as_text(gateway: RunningGateway) -> None:
    word = gateway.tokenizer.encode(" fox")[0]
    answer = await gateway.post(PATH, prompt=PROMPT, max_tokens=3, allowed_token_ids=[word])
    assert answer["choices"][0]["text"] == " fox fox fox"
    error = await gateway.refusal(PATH, {"prompt": PROMPT, "logit_bias": {"406": 1}})
    assert error["param"] == "logit_bias"


async def test_ignored_fields_are_named_in_a_header(gateway: RunningGateway) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "store": True, "metadata": {"a": "b"}, "n": None}
    for stream in (False, True):
        response = await gateway.http.post(PATH, json={**body, "stream": stream})
        assert response.status_code == 200
        assert response.headers["x-splitserve-ignored-fields"] == "metadata, store"


REFUSED: list[tuple[Json, str | None]] = [
    ({"suffix": "x"}, "suffix"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": 1e39}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 2**31}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**400}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": [1]}, "stop.0"),
    ({"stop": "a" * 1025}, "stop"),
    ({"user": "u" * 129}, "user"),
    ({"priority": 101}, "priority"),
    ({"cache_salt": "s" * 129}, "cache_salt"),
    ({"deadline_s": 0}, "deadline_s"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"bad_words": ["x"] * 513}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [406]}, "allowed_token_ids"),
    ({"stop_token_ids": [406]}, "stop_token_ids"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"use_beam_search": True, "n": 2, "top_k": 3}, "top_k"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt.1"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [406]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 33, "n": 128}, "n"),
    ({"prompt": "x " * 3000}, "prompt"),
    ({"prompt_token_ids": [1]}, "prompt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"frobnicate": True}}, "stream_options.frobnicate"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_field_is_refused_by_name_when_it_cannot_be(
    gateway: RunningGateway, fields: Json, param: str | None
) -> None:
    error = await gateway.refusal(PATH, {"prompt": PROMPT, **fields})
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(error["message"]) < 300


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


async def test_batch_leaves_nothing_behind_when_one_of_its_prompts_is_refused(
    gateway: RunningGateway,
) -> None:
    body = {"prompt": [[1, 2, 3], [406], [4]], "max_tokens": 500}
    error = await gateway.refusal(PATH, body)
    assert error["param"] == "prompt"
    await gateway.service.wait_idle()
