"""Chats are rendered as by transformers."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from splitserve_client import ChatTemplateFailed
from splitserve_text import ChatTemplates
from tests.support.models import chat_templates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": " What is <b>2 & 2</b>? ü "}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "It is 4. "}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "text": "ü <b>"}},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "4"}
THINKING = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds", "parameters": PARAMETERS},
    }
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "calls": [USER, CALLING, RESULT],
    "thinking": [USER, THINKING, USER],
    "alternating": [ANSWER, USER],
}


def theirs(source: str, chat: list[dict[str, Any]], **options: Any) -> str:  # noqa: ANN401
    try:
        values: Any = {**TOKENS, **options}
        rendered = render_jinja_template([copy.deepcopy(chat)], chat_template=source, **values)[0]
    except Exception:
        return "refused"
    return str(rendered[0])


@cache
def templates_of(source: str) -> ChatTemplates:
    return ChatTemplates({"default": source}, TOKENS)


def ours(source: str, chat: list[dict[str, Any]], **options: Any) -> str:  # noqa: ANN401
    try:
        return templates_of(source).render(chat, **options)
    except ChatTemplateFailed:
        return "refused"


@pytest.mark.parametrize("name", chat_templates.USUAL)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompts", [True, False])
def test_chat_is_rendered_as_by_transformers(
    name: str, chat: str, tools: list[dict[str, Any]] | None, prompts: bool
) -> None:
    source = chat_templates.USUAL[name]
    options = {"tools": tools, "add_generation_prompt": prompts}

    expected, text = theirs(source, CHATS[chat], **options), ours(source, CHATS[chat], **options)

    # Ours is not refused where a template takes no null; it takes something else instead.
    assert text == expected or (chat == "calls" and expected == "refused" and "None" not in text)


@pytest.mark.parametrize("name", chat_templates.USUAL)
@pytest.mark.parametrize("end", ["It is", "It is ", "  It is\n"])
def test_a_final_message_is_continued_as_by_transformers_when_asked(name: str, end: str) -> None:
    source = chat_templates.USUAL[name]
    chat = [USER, {"role": "assistant", "content": end}]

    expected = theirs(source, chat, continue_final_message=True)

    assert expected.endswith(end.strip()) or expected.endswith(end)
    assert ours(source, chat, continue_final_message=True) == expected


def test_most_of_these_chats_are_rendered_when_templates_are_usual() -> None:
    texts = [ours(s, c) for s in chat_templates.USUAL.values() for c in CHATS.values()]

    assert texts.count("refused") <= 5


def test_variables_reach_the_template_when_they_are_given() -> None:
    text = ours(chat_templates.QWEN, [USER], variables={"enable_thinking": False})

    assert text == theirs(
        chat_templates.QWEN, [USER], enable_thinking=False, add_generation_prompt=True
    )
    assert text.endswith("<think>\n\n</think>\n\n")
    assert ours(chat_templates.QWEN, [USER], variables={"messages": []}) == "refused"


def test_parts_are_joined_when_a_template_wants_texts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    text = ours(chat_templates.CHATML, [{"role": "user", "content": parts}])

    assert text == ours(chat_templates.CHATML, [{"role": "user", "content": "one\ntwo"}])


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {}}], [3], [{"type": "text"}], {1, 2}, b"x"]
)
def test_a_content_is_refused_when_it_is_no_text(content: object) -> None:
    assert ours(chat_templates.CHATML, [{"role": "user", "content": content}]) == "refused"


def test_template_is_chosen_by_name_or_tools() -> None:
    files = {
        "chat_template.jinja": b"default",
        "additional_chat_templates/tool_use.jinja": b"tools",
        "additional_chat_templates/rag.jinja": b"{{ documents[0].text }}",
    }
    templates = ChatTemplates.from_files(files, {"chat_template": "older"}, {})
    assert templates is not None

    assert templates.render([USER]) == "default"
    assert templates.render([USER], tools=TOOLS) == "tools"
    assert templates.render([USER], tools=TOOLS, template_name="default") == "default"
    assert templates.render([USER], template_name="rag", documents=[{"text": "x"}]) == "x"
    with pytest.raises(ChatTemplateFailed, match="it has: default, rag, tool_use"):
        templates.render([USER], template_name="other")


def test_render_leaves_the_messages_of_the_caller_unchanged() -> None:
    chat: list[dict[str, Any]] = [
        USER,
        CALLING,
        RESULT,
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
    ]
    before = copy.deepcopy(chat)

    ours(chat_templates.GEMMA, chat, continue_final_message=True)

    assert chat == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<' + ('&' | safe) + '\"' }}",
        "{{ ('<' | safe) + ('&' | safe) }}",
        "{{ ('<' | e) + '>' + ({'a': \"'\"} | tojson) }}",
        "{{ '<' + ('&' | safe) ~ '<' }}{{ ['<', '&' | safe] | join('>') }}",
        "{{ ('<' + ('a' | tojson | safe)) | length }}",
        "{% set text = 'a' | safe %}{% for x in [1, 2] %}{{ '<' + text + x | string }}{% endfor %}",
    ],
)
def test_additions_to_safe_text_are_escaped_as_by_transformers(source: str) -> None:
    text = ours(source, [USER])

    assert text == theirs(source, [USER])
    assert text != "refused"
