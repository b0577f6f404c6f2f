"""Anthropic's Messages API with its official client, before a scheduler with scripted outputs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx2
import pytest
import pytest_asyncio

from splitserve_client import Tokenizer
from splitserve_contract import DomainError
from splitserve_gateway.config import GatewayConfig
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_scheduler import Failed, FakeScheduler, start
from tests.support.models import tiny_tokenizers
from tests.support.processes.gateway import serving, url_of
from tests.support.processes.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/messages"
Json = dict[str, Any]
MODEL = "fake"
EOS = 1
# Calls and reasons as models of the Hermes kind do.
TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}"
    "{{ '\\n' }}{% endif %}{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['reasoning_content'] %}<think>{{ message['reasoning_content'] }}</think>"
    "{% endif %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function']['name'] }}"
    "{{ call['function']['arguments'] | tojson }}</tool_call>{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
USER: Json = {"role": "user", "content": "the fox?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Json = {"name": "get_weather", "description": "Weather now.", "input_schema": SCHEMA}
SEARCH: Json = {"name": "search", "input_schema": {"type": "object"}}
TEMPLE = 'Ünïts {°} "quoted" </tool_call'


def call_of(name: str, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>\n"


@dataclass(frozen=True, slots=True)
class Running:
    """Gateway before a fake scheduler; `http` and `client` are connected to it."""

    fake: FakeScheduler
    tokenizer: Tokenizer
    http: httpx2.AsyncClient
    client: anthropic.AsyncAnthropic

    def will_say(self, *texts: str) -> None:
        """Scripts the outputs of the next requests."""
        self.fake.outputs += [[*self.encode(text), EOS] for text in texts]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def prompt(self) -> str:
        """Prompt of the last request."""
        token_ids = list(self.fake.requests[-1].prompt_token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def both(self, text: str, **fields: Any) -> anthropic.types.Message:  # noqa: ANN401
        """The message that says `text`; asserts that a stream adds up to the same."""
        asked: Any = {"model": MODEL, "max_tokens": 500, "messages": [USER], **fields}
        self.will_say(text, text)
        whole: anthropic.types.Message = await self.client.messages.create(**asked)
        async with self.client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        assert comparable(streamed) == comparable(whole)
        assert streamed.id != whole.id
        return whole

    async def error(self, body: object, status: int = 400, path: str = PATH) -> Json:
        """The error object of the answer to `body`, which must have `status`."""
        response = await self.http.post(path, json=body)
        assert response.status_code == status, response.text
        content: Json = response.json()
        assert content.keys() == {"type", "error", "request_id"}
        assert content["type"] == "error"
        assert content["request_id"] == response.headers["request-id"]
        assert content["request_id"] == response.headers["x-request-id"]
        error: Json = content["error"]
        assert error.keys() == {"type", "message", "details"}
        return error


def comparable(message: anthropic.types.Message) -> Json:
    """The message without ids, which differ between requests."""
    shape = message.to_dict()
    content: Any = shape["content"]
    blocks = [
        {k: v for k, v in block.items() if k not in ("id", "parsed_output")} for block in content
    ]
    del shape["id"]
    return {**shape, "content": blocks, "stop_details": None}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    files = {
        "tokenizer.json": tiny_tokenizers.byte_level().to_str().encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    fake = FakeScheduler(
        tokenizer_files=files, max_model_len=4096, adapter_refusal="ADAPTER_UNKNOWN"
    )
    scheduler = await start(fake)
    config = GatewayConfig(schedulers=f"127.0.0.1:{scheduler.port}")
    async with (
        serving(config) as server,
        httpx2.AsyncClient(base_url=url_of(server), timeout=PATIENCE_S, trust_env=False) as http,
        anthropic.AsyncAnthropic(base_url=url_of(server), api_key="none", max_retries=0) as client,
    ):

        async def is_ready() -> tuple[bool, object]:
            answer = await http.get("/health/ready")
            return answer.status_code == 200, answer.text

        await poll(is_ready, PATIENCE_S)
        yield Running(fake, Tokenizer.from_files(files), http, client)
    await scheduler.server.stop(None)


# -- messages --------------------------------------------------------------------------------------


async def test_message_is_the_answer_to_the_chat(running: Running) -> None:
    message = await running.both("It jumps.", system="be brief")

    assert running.prompt == "[system]be brief\n[user]the fox?\n[assistant]"
    assert message.to_dict() == {
        "id": message.id,
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "It jumps."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(running.encode(running.prompt)),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(running.encode("It jumps.")) + 1,
        },
    }
    assert message.id.startswith("msg_")


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"stop_sequences": ["fox", "ju"]}, "stop_sequence", "ju", "It "),
        ({"max_tokens": 3}, "max_tokens", None, None),
    ],
)
async def test_message_says_what_ended_it(
    running: Running, fields: Json, reason: str, sequence: str | None, text: str | None
) -> None:
    message = await running.both("It jumps over.", **fields)

    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == (text or running.tokenizer.decode(running.encode("It jumps over.")[:3]))


async def test_message_continues_the_assistants_text_when_it_is_last(running: Running) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]

    message = await running.both(" brown.", messages=messages)

    assert running.prompt == "[user]the fox?\n[assistant]It is"
    assert message.content[0].to_dict() == {"type": "text", "text": " brown."}


async def test_tool_loop_ends_with_an_answer(running: Running) -> None:
    """Answers go back as the client has them, and results as an agent sends them."""
    asked: Any = {"model": MODEL, "max_tokens": 500, "tools": [WEATHER, SEARCH]}
    said = (
        "<think>Two cities.</think>I look."
        + call_of("get_weather", city=TEMPLE)
        + call_of("search", query={"all": ["x", {"y": None}]})
    )
    first = await running.both(said, messages=[USER], **{k: asked[k] for k in ("tools",)})
    thinking, text, weather, search = first.content
    assert first.stop_reason == "tool_use"
    assert thinking.type == "thinking"
    assert (thinking.thinking, bool(thinking.signature)) == ("Two cities.", True)
    assert text.to_dict() == {"type": "text", "text": "I look."}
    assert weather.type == search.type == "tool_use"
    assert (weather.name, weather.input) == ("get_weather", {"city": TEMPLE})
    assert (search.name, search.input) == ("search", {"query": {"all": ["x", {"y": None}]}})

    results = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": "12 °C"},
        {
            "type": "tool_result",
            "tool_use_id": search.id,
            "content": [{"type": "text", "text": "not found"}],
            "is_error": True,
        },
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    turns: Any = [
        USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    running.will_say("<think>Done.</think>12 °C.")
    second = await running.client.messages.create(messages=turns, **asked)

    arguments = json.dumps({"city": TEMPLE}, ensure_ascii=False)
    assert running.prompt == (
        "[tools]get_weather search \n[user]the fox?\n"
        f"[assistant]<think>Two cities.</think>I look.<tool_call>get_weather{arguments}</tool_call>"
        '<tool_call>search{"query": {"all": ["x", {"y": null}]}}</tool_call>\n'
        "[tool]12 °C\n[tool]not found\n[user]Be brief.\n[assistant]"
    )
    assert second.stop_reason == "end_turn"
    assert [block.type for block in second.content] == ["thinking", "text"]


async def test_call_that_is_cut_has_the_same_input_in_a_stream(running: Running) -> None:
    """With a forced call the arguments are streamed as they come."""
    said = call_of("get_weather", city="Oslo", days=[1, 2], more="cut here")
    length = len(running.encode(said[: said.index("cut") + 2]))
    forced = {"tools": [WEATHER], "tool_choice": {"type": "any"}}

    message = await running.both(said, max_tokens=length, **forced)

    (block,) = message.content
    assert block.type == "tool_use"
    assert block.input == {"city": "Oslo", "days": [1, 2]}
    assert message.stop_reason == "max_tokens"
    assert running.fake.requests[-1].sampling_params.HasField("grammar")


async def test_thinking_is_off_when_the_template_can_switch_it(running: Running) -> None:
    message = await running.both("Yes.", thinking={"type": "disabled"})

    assert running.prompt.endswith("[assistant]<think></think>")
    assert message.content[0].to_dict() == {"type": "text", "text": "Yes."}


async def test_output_follows_a_schema_when_there_is_one(running: Running) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}

    message = await running.both('{"city": "Oslo"}', output_config={"format": form})

    assert message.content[0].to_dict() == {"type": "text", "text": '{"city": "Oslo"}'}
    assert running.fake.requests[-1].sampling_params.HasField("grammar")


# -- requests of coding agents ---------------------------------------------------------------------

EPHEMERAL = {"type": "ephemeral"}
AGENT: Json = {
    "model": MODEL,
    "max_tokens": 32000,
    "stream": True,
    "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "session_id": "s" * 36})},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=00000;"},
        {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Use tools.", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"},
                {"type": "text", "text": "List files.", "cache_control": EPHEMERAL},
            ],
        },
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                "required": ["command"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
            "cache_control": EPHEMERAL,
        }
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "authorization": "Bearer anything",
}


async def test_request_of_a_coding_agent_is_answered(running: Running) -> None:
    running.will_say("<think>hm</think>" + call_of("Bash", command="ls"))
    async with running.http.stream(
        "POST", f"{PATH}?beta=true", json=AGENT, headers=HEADERS
    ) as response:
        text = (await response.aread()).decode()

    assert response.status_code == 200, text
    assert response.headers["content-type"].startswith("text/event-stream")
    ignored = response.headers["x-splitserve-ignored-fields"].split(", ")
    assert {"metadata", "context_management", "system.cache_control"} <= set(ignored)
    assert running.prompt == (
        "[tools]Bash \n[system]You are an agent.\nUse tools.\n"
        "[user]<system-reminder>\nToday.\n</system-reminder>\nList files.\n[assistant]"
    )
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    datas = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [data["type"] for data in datas]
    kinds = [data["type"] for data in datas]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    starts = [data["content_block"] for data in datas if data["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1] == {**starts[1], "type": "tool_use", "name": "Bash", "input": {}}
    deltas = [data["delta"] for data in datas if data["type"] == "content_block_delta"]
    kinds = [delta["type"] for delta in deltas]
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "input_json_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    pieces = [delta.get("partial_json", "") for delta in deltas]
    assert json.loads("".join(pieces)) == {"command": "ls"}
    assert datas[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert datas[-2]["usage"]["output_tokens"] > 0


async def test_tokens_are_counted_as_the_answer_has_them(running: Running) -> None:
    fields = {name: AGENT[name] for name in ("model", "system", "messages", "tools", "thinking")}

    count = await running.client.messages.count_tokens(**fields)
    message = await running.both("Yes.", **fields)

    usage = message.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert count.to_dict() == {"input_tokens": len(running.encode(running.prompt))}


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "kind", "message"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Input should be"),
        ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
        ({"model": "claude"}, 404, "not_found_error", "the model 'claude' is not served"),
        ({"frob": 1}, 400, "invalid_request_error", "unknown field 'frob'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.type: must be 'text' or 'tool_result'",
        ),
        (
            {"messages": [{"role": "user", "content": "fox " * 20000}]},
            400,
            "invalid_request_error",
            "prompt is too long: ",
        ),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
            400,
            "invalid_request_error",
            'tools.0.input_schema.type: must be "object"',
        ),
        (
            {"tools": [SEARCH, SEARCH]},
            400,
            "invalid_request_error",
            "tools.1.name: is search",
        ),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "b"}},
            400,
            "invalid_request_error",
            "tool_choice.name: is not",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "frob"}}}},
            400,
            "invalid_request_error",
            "output_config.format",
        ),
        (
            {"messages": [{**USER, "content": [json.loads("[" * 60 + "]" * 60)]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0",
        ),
    ],
)
async def test_error_has_the_shape_of_anthropic(
    running: Running, fields: Json, status: int, kind: str, message: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [USER], **fields}

    error = await running.error(body, status)

    assert error["type"] == kind
    assert message in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("reason", "text", "status", "kind", "param"),
    [
        ("QUEUE_FULL", "the queue is full", 429, "rate_limit_error", None),
        ("QUOTA_EXCEEDED", "the tenant has its share", 429, "rate_limit_error", None),
        ("DEADLINE_UNREACHABLE", "it cannot be met", 504, "timeout_error", None),
        ("CALLER_NOT_ALLOWED", "not this priority", 403, "permission_error", None),
        ("SAMPLING_PARAMS_INVALID", "top_k is -5", 400, "invalid_request_error", "top_k"),
        ("PROMPT_TOO_LONG", "prompt_token_ids", 400, "invalid_request_error", "messages"),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_refusal_of_the_scheduler_has_its_status_and_type(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    text: str,
    status: int,
    kind: str,
    param: str | None,
    is_stream: bool,
) -> None:
    def refuse(_: object) -> None:
        raise DomainError(reason, text)

    monkeypatch.setattr(running.fake, "before_request", refuse)
    body = {"max_tokens": 5, "messages": [USER], "stream": is_stream}

    error = await running.error(body, status)

    assert (error["type"], error["details"]["param"]) == (kind, param)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/messages/batches", 404, "not_found_error"),
        ("/v1/messages/count_tokens", 400, "invalid_request_error"),
    ],
)
async def test_error_has_the_shape_of_anthropic_at_other_paths(
    running: Running, path: str, status: int, kind: str
) -> None:
    assert (await running.error({}, status, path))["type"] == kind


async def test_body_is_refused_when_it_is_no_json(running: Running) -> None:
    for body in (b"{", b"", b"[" * 10**5, b"\xff", b'{"messages": "' + b"x" * 10**5):
        response = await running.http.post(
            PATH, content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_stream_ends_with_an_error_when_the_request_fails(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = running.fake.num_tokens

    def fail(number: int) -> None:
        if number == first + 3:
            raise Failed("EXECUTOR_FAULT")

    monkeypatch.setattr(running.fake, "before_token", fail)
    running.will_say("Once upon a time")
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": [USER]}
    with pytest.raises(anthropic.APIStatusError) as failed:
        async with running.client.messages.stream(**asked) as stream:
            await stream.get_final_message()

    assert failed.value.type == "api_error"
    code: str | None = failed.value.error_code
    assert code == "executor_fault"
    assert isinstance(failed.value.body, dict)
    assert failed.value.body["request_id"] == failed.value.response.headers["request-id"]
