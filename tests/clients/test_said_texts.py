"""Tool calls and reasoning of a model that says any text, through the whole stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from splitserve_gateway.config import GatewayConfig
from splitserve_options import options
from splitserve_text import FORMATS, REASONING_MARKS
from tests.clients.said_texts import Speaker
from tests.clients.stack import CHAT_TEMPLATE, MODEL, ServedModel, served
from tests.support.models.chat_templates import family_template_file
from tests.support.models.template_inputs import inputs_of
from tests.support.processes.gateway import serving, url_of
from tests.unit.text.parsing.families import FAMILIES

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"value": {"type": kind}}},
        },
    }
    for name, kind in (("look_up", "object"), ("store", "string"))
]
ARGUMENTS: list[dict[str, Any]] = [
    {"value": {"deep": [1, {"er": None}], "quote": 'he said "no" \\ {'}},
    {"value": "é → 漢字 </tool_call> <tool_call>"},
]


# By chat template: the family, and what the model says before its calls; then the reasoning and
# the content that are read.
SAID = {
    "command_r7b": ("Command R7B, Command A", "<|START_THINKING|>Hm.<|END_THINKING|>", "Hm.", None),
    "deepseek_v31": ("DeepSeek V3.1", "I look.", None, "I look."),
    "gemma3": ("Gemma 3 in a fence", "I look.\n", None, "I look."),
    "gemma4": ("Gemma 4", "<|channel>thought\nHm.<channel|>I look.", "Hm.", "I look."),
    "glm45": ("GLM 4.5", "<think>Hm.</think>I look.", "Hm.", "I look."),
    "gpt_oss": ("gpt-oss", "", None, None),
    "granite3": ("Granite 3", "I look.", None, "I look."),
    "kimi_k2_thinking": ("Kimi K2", "<think>Hm.", "Hm.", None),
    "lfm2": ("LFM 2", "<think>Hm.</think>", "Hm.", None),
    "minimax_m2": ("MiniMax M2", "Hm.</think>I look.", "Hm.", "I look."),
    "mistral_v11": ("Mistral v11, Magistral", "I look.", None, "I look."),
    "qwen3_coder": ("Qwen3-Coder", "I look.\n", None, "I look."),
}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    """Most marks are special tokens, as with the families; <tool_call> is none, as with Qwen."""
    texts = {
        text
        for name in (FAMILIES[family][0] for family, *_ in SAID.values())
        for text in FORMATS[name].marker_texts
    }
    texts.update(*(REASONING_MARKS[name].marker_texts for name in ("command", "gemma4")))
    special = {text for text in texts if "|" in text or "｜" in text} - {"<|end|>"}  # noqa: RUF001
    folder = tmp_path_factory.mktemp("model")
    return Speaker(folder, CHAT_TEMPLATE, sorted({*special, "<|im_middle|>"}))


@pytest.fixture(scope="module")
def running(speaker: Speaker) -> Iterator[ServedModel]:
    with served(speaker.folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: ServedModel) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_text_is_said_when_it_is_far_back(client: OpenAI, speaker: Speaker) -> None:
    text = "Anything: naïve, 漢字, {braces} and <angles>."
    answer = client.chat.completions.create(model=MODEL, messages=speaker.messages(text))  # type: ignore[arg-type]
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"


def test_calls_are_said_when_their_arguments_have_markers(client: OpenAI, speaker: Speaker) -> None:
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in zip(("look_up", "store"), ARGUMENTS, strict=True)
    ]
    text = "I look. " + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    asked: Any = {"model": MODEL, "messages": speaker.messages(text, TOOLS), "tools": TOOLS}

    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        arguments = [
            event for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        streamed = stream.get_final_completion().choices[0]

    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content or "").strip() == "I look."
        found = choice.message.tool_calls or []
        assert [call.function.name for call in found] == ["look_up", "store"]
        assert [json.loads(call.function.arguments) for call in found] == ARGUMENTS
    assert len(arguments) > len(ARGUMENTS)


def results_of(message: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return [
        {"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name} done"}
        for call in message.tool_calls
    ]


def used(message: dict[str, Any]) -> dict[str, Any]:
    """The message without the fields that no template reads."""
    names = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
    return {name: message[name] for name in names if message.get(name) is not None}


async def rendered(client: AsyncOpenAI, turns: list[Any]) -> str:
    """The prompt of a chat."""
    tokens: Any = await client.post(
        "../tokenize", body={"messages": turns, "tools": TOOLS}, cast_to=object
    )
    body = {"tokens": tokens["tokens"]}
    text: Any = await client.post("../detokenize", body=body, cast_to=object)
    return str(text["prompt"])


@pytest.mark.parametrize("template", SAID)
async def test_calls_are_said_in_the_notation_of_a_template_file(
    template: str, running: ServedModel, speaker: Speaker
) -> None:
    family, before, reasoning, content = SAID[template]
    arguments = [ARGUMENTS[0], {"value": "é → 漢字 [TOOL_CALLS]"}]
    calls = list(zip(("look_up", "store"), arguments, strict=True))
    text = before + FAMILIES[family][1](calls).removeprefix("<|start|>assistant")
    file = family_template_file(template)
    asked: Any = {
        "model": MODEL,
        "messages": speaker.messages(text, TOOLS, file.read_text()),
        "tools": TOOLS,
    }

    given = [f"--chat-template={file}", f"--schedulers={running.scheduler}"]
    config = GatewayConfig.from_options(options.parse("gateway", given, {}))
    async with (
        serving(config) as server,
        AsyncOpenAI(base_url=f"{url_of(server)}/v1", api_key="none", max_retries=3) as client,
    ):
        whole = (await client.chat.completions.create(**asked)).choices[0]
        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        turns: list[Any] = [*asked["messages"], whole.message.model_dump()]
        turns += results_of(whole.message)
        prompt = await rendered(client, turns)

    inputs = inputs_of(template, [used(turn) for turn in turns])
    assert prompt == speaker.prompt(inputs, TOOLS, file.read_text())

    for choice in (whole, streamed):
        message: Any = choice.message
        assert choice.finish_reason == "tool_calls"
        found = [
            (call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
        ]
        assert found == calls
        said = (message.content or "").strip(), getattr(message, "reasoning_content", None)
        assert said == (content or "", reasoning)
