"""Chat templates with each form of contents and arguments."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from splitserve_client import ChatTemplateFailed
from splitserve_text import ChatTemplates

CALLS_AS_TEXT = (
    "{% for call in message.tool_calls %}"
    "{{ '<call>' + call.function.name + '=' + call.function.arguments + '</call>' }}{% endfor %}"
)
CALLS_AS_JSON = (
    "{% for call in message.tool_calls %}"
    "<call>{{ call.function.name }}={{ call.function.arguments | tojson }}</call>{% endfor %}"
)
CALLS_AS_ITEMS = (
    "{% for call in message.tool_calls %}<call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}"
    "</call>{% endfor %}"
)
CALLS_PRINTED = (
    "{% for call in message.tool_calls %}"
    "<call>{{ call.function.name }}={{ call.function.arguments }}</call>{% endfor %}"
)
# How a message of an assistant is written. Each stands for a kind of template in use.
ASSISTANTS = {
    "calls where content is none": (
        "{% if message['content'] is none %}" + CALLS_AS_TEXT + "{% endif %}"
        "{% if message['content'] is not none %}{{ message['content'] + '<end>' }}{% endif %}"
    ),
    "calls where there is no content": (
        "{% if 'content' in message %}{{ message.content + '<end>' }}"
        "{% else %}" + CALLS_AS_JSON + "{% endif %}"
    ),
    "calls where content is empty": (
        "{% if message.content == '' %}" + CALLS_AS_ITEMS + "{% else %}"
        "{{ message.content }}{% endif %}"
    ),
    "prints content": "{{ message.content }}" + CALLS_AS_JSON,
    "adds content": "{{ '>' + message.content }}" + CALLS_AS_TEXT,
    "trims content": "{{ message.content | trim }}" + CALLS_AS_ITEMS,
    "content as json": "{{ message.content | tojson }}" + CALLS_AS_JSON,
    "prints arguments": "{{ message.content or '' }}" + CALLS_PRINTED,
    "content if it is defined": (
        "{% if message.content is defined %}{{ '\\n' + message.content }}{% endif %}"
        + CALLS_AS_ITEMS
    ),
    "refuses an empty content": (
        "{% if message.content is string and not message.content %}"
        "{{ raise_exception('content is empty') }}{% endif %}"
        "{% if message.content %}{{ message.content }}{% endif %}" + CALLS_AS_JSON
    ),
    "parts alone": (
        "{% for part in message.content %}{{ part.text }}{% endfor %}" + CALLS_AS_ITEMS
    ),
    "either form of arguments": (
        "{{ message.content or '' }}{% for call in message.tool_calls %}"
        "<call>{{ call.function.name }}={% if call.function.arguments is string %}"
        "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}"
        "</call>{% endfor %}"
    ),
    "calls if there are tools": (
        "{{ message.content or '' }}{% if tools %}" + CALLS_AS_TEXT + "{% endif %}"
    ),
}
AROUND = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{% if message.role == 'assistant' %}ASSISTANT"
    "{% elif message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
ABSENT = object()
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def rendered(source: str, *messages: dict[str, Any], **options: Any) -> str:  # noqa: ANN401
    return ChatTemplates({"default": source}, {}).render(messages, **options)


def template(name: str) -> str:
    return AROUND.replace("ASSISTANT", ASSISTANTS[name])


def calling(content: object, arguments: object) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    message: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    return message if content is ABSENT else {**message, "content": content}


USER = {"role": "user", "content": "where?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "found"}


@pytest.mark.cases(11)
@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("has_tools", [True, False])
def test_past_calls_are_written_in_any_form(name: str, has_tools: bool) -> None:
    values = {"place": "äh"}
    forms = itertools.product(
        (None, "", ABSENT, "said", [{"type": "text", "text": "said"}]),
        (values, json.dumps(values, ensure_ascii=False)),
    )
    for content, arguments in forms:
        tools = TOOLS if has_tools else None
        text = rendered(template(name), USER, calling(content, arguments), RESULT, tools=tools)

        assert "None" not in text
        assert "null" not in text
        assert ("said" in text) == (content not in (None, "", ABSENT)), (name, content, text)
        if name == "calls if there are tools" and not has_tools:
            continue
        assert "<call>look" in text, (name, content, text)
        assert "äh" in text
        assert '"place": "äh"' in text or "<place>äh" in text, (name, content, text)
        assert text.index("[user]where?") < text.index("<call>") < text.index("[tool]found")


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("arguments", ["", "{}", {}, None])
def test_call_without_arguments_is_written_in_any_form(name: str, arguments: object) -> None:
    text = rendered(template(name), USER, calling(None, arguments), RESULT, tools=TOOLS)

    assert "<call>look" in text
    assert "None" not in text


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "critic"])
@pytest.mark.parametrize("content", [None, "", [], ABSENT])
@pytest.mark.parametrize(
    "writing",
    [
        "{{ message.content }}",
        "{{ '' + message['content'] }}",
        "{{ message.content | trim }}",
        "{{ message.content | string }}",
        "{% for part in message.content %}{{ part.text }}{% endfor %}",
        "{{ message['content'][0]['text'] }}",
    ],
)
def test_missing_content_is_rendered_as_no_text(role: str, content: object, writing: str) -> None:
    source = "{% for message in messages %}<{{ message.role }}>" + writing + "{% endfor %}"
    message = {"role": role} if content is ABSENT else {"role": role, "content": content}

    assert rendered(source, USER, message).removeprefix("<user>where?") == f"<{role}>"


def test_each_role_has_its_own_form_of_content() -> None:
    source = (
        "{% for message in messages %}{% if message.role == 'user' %}"
        "{% for part in message.content %}{{ part.text }}{% endfor %}"
        "{% else %}{{ '|' + message.content }}{% endif %}{% endfor %}"
    )
    answer = {"role": "assistant", "content": [{"type": "text", "text": "there"}]}

    text = rendered(source, {"role": "system", "content": "s"}, USER, answer, RESULT)

    assert text == "|swhere?|there|found"


def test_empty_list_of_calls_is_ignored() -> None:
    source = "{% for m in messages %}{{ 'calls' if 'tool_calls' in m else m.content }}{% endfor %}"

    assert rendered(source, {"role": "assistant", "content": "x", "tool_calls": []}) == "x"


def test_chat_is_refused_when_template_takes_no_form() -> None:
    with pytest.raises(ChatTemplateFailed, match="no calls here"):
        rendered("{{ raise_exception('no calls here') }}", USER, calling(None, {}))


@pytest.mark.parametrize(
    ("writing", "rendering"),
    [
        ("{{ message.name }}", "look"),
        ("{{ message['name'] | tojson }}", '"look"'),
        ("{{ message.get('name', '') }}", "look"),
        ("{{ message.name or message.role }}", "tool"),
        ("{% if message.name is defined %}of {{ message.name }}{% endif %}", ""),
    ],
)
def test_result_has_the_name_of_its_call_when_nothing_else_is_written(
    writing: str, rendering: str
) -> None:
    source = "{% for message in messages if message.role == 'tool' %}<" + writing + ">{% endfor %}"
    result = {key: value for key, value in RESULT.items() if key != "name"}

    assert rendered(source, USER, calling(None, {}), result) == f"<{rendering}>"
    assert "look" in rendered(source, USER, calling(None, {}), RESULT)


@pytest.mark.parametrize("arguments", ['{"place": "Os', "[1]", '"x"'])
def test_past_call_is_named_when_its_arguments_are_no_object(arguments: str) -> None:
    source = template("trims content")
    cut = calling(None, arguments)

    with pytest.raises(ChatTemplateFailed) as refused:
        rendered(source, USER, calling(None, {}), RESULT, cut, RESULT)

    assert f"the past call of 'look' are {arguments!r}; allowed" in str(refused.value)
    assert arguments in rendered(template("adds content"), USER, cut, RESULT)


ONE_CALL = (
    "{% for message in messages %}{% if message.tool_calls %}"
    "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "<{{ message.tool_calls[0].id }}>{% else %}[{{ message.tool_call_id or message.role }}]"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("results", "rendering"),
    [
        ("abc", "[user]<a>[a]<b>[b]<c>[c][user]"),
        ("ba", "[user]<a><b>[b][a]<c>[user]"),
        ("", "[user]<a><b><c>[user]"),
        ("xa", "[user]<a>[x][a]<b><c>[user]"),
    ],
)
def test_calls_are_written_one_by_one_when_the_template_refuses_several(
    results: str, rendering: str
) -> None:
    (call,) = calling(None, {})["tool_calls"]
    calls = {**calling(None, {}), "tool_calls": [{**call, "id": name} for name in "abc"]}
    answers = [{**RESULT, "tool_call_id": name} for name in results]

    assert rendered(ONE_CALL, USER, calls, *answers, USER) == rendering
