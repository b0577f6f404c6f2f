"""Notations of tool calls through a gateway: by the chat template, the model's or a file's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitserve_gateway.config import GatewayConfig
from splitserve_options import options
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio
PATH = "/v1/chat/completions"
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CHAT = {
    "messages": [{"role": "user", "content": "1?"}],
    "tools": [{"type": "function", "function": TOOL}],
}
OWN = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}!"
OTHER = "{# <arg_key> #}{% for m in messages %}[{{ m.content }}]{% endfor %}"
CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"


async def answered(gateway: RunningGateway) -> dict[str, object]:
    (token_id,) = gateway.tokenizer.encode(CALL, add_special_tokens=False)
    answer = await gateway.post(PATH, **CHAT, allowed_token_ids=[token_id], max_tokens=2)
    message: dict[str, object] = answer["choices"][0]["message"]
    return message


async def rendered(gateway: RunningGateway) -> str:
    tokens = (await gateway.post("/tokenize", **CHAT))["tokens"]
    text: str = (await gateway.post("/detokenize", tokens=tokens))["prompt"]
    return text


async def test_unknown_notation_is_logged_once_and_calls_are_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway(text_executor(tmp_path, OWN, [CALL])) as gateway:
        message = await answered(gateway)

    assert (message["content"], message.get("tool_calls")) == (CALL * 2, None)
    logged = [each for each in caplog.records if each.msg.startswith("tool_calls_unknown")]
    assert [each.levelname for each in logged] == ["WARNING"]


async def test_template_of_a_file_takes_the_place_of_the_models_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "glm.jinja"
    file.write_text(OTHER)
    values = options.parse("gateway", [f"--chat-template={file}"], {})
    config = GatewayConfig.from_options(values)
    async with running_gateway(text_executor(tmp_path, OWN, [CALL]), config=config) as gateway:
        message = await answered(gateway)
        assert await rendered(gateway) == "[1?]"

    calls = message["tool_calls"]
    assert isinstance(calls, list)
    functions = [call["function"] for call in calls]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == [
        ("add", {"a": 1})
    ] * 2
    assert message["content"] is None
    assert "tool_calls_unknown" not in caplog.text
