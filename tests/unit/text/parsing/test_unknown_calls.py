"""Chat templates whose tool calls cannot be read."""

from __future__ import annotations

import json

import pytest
import tokenizers
from transformers.utils.chat_parsing import parse_response

from splitserve_text import (
    ChatTemplates,
    OutputFormat,
    OutputParser,
    ParserOptions,
    Tokenizer,
    unread_calls,
)
from tests.support.models.chat_templates import family_templates
from tests.unit.text.parsing.answers import TOOLS, Answer

FAMILY_TEMPLATES = family_templates()
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}CALLS{% endfor %}"
DECLARED = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}WRITTEN{% endfor %}"
NAME = "{{ c.function.name }}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
GENERATION = "{% if add_generation_prompt %}<assistant>{% endif %}"


def tokenizer_of(
    written: str | None, *, response_template: object = None, begun: str = ""
) -> Tokenizer:
    calls = "" if written is None else CALLS.replace("WRITTEN", written)
    source = DECLARED + CHAT.replace("CALLS", calls)
    source += GENERATION.replace("<assistant>", f"<assistant>{begun}")
    templates = ChatTemplates({"default": source}, {}, response_template=response_template)
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), templates)


@pytest.mark.parametrize(
    ("written", "assumed"),
    [
        (f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}', None),
        (f'<tool_call>{{"name": "{NAME}", "arguments": {ARGUMENTS}}}</tool_call>', None),
        (f"CALL {NAME} WITH {ARGUMENTS} END", "json"),
        (None, "json"),
        (f"<tool_call>CALL {NAME} WITH {ARGUMENTS}</tool_call>", "hermes"),
        ("<tool_call>a call</tool_call>", None),
    ],
)
def test_calls_are_unread_when_the_template_writes_them_its_own_way(
    written: str | None, assumed: str | None
) -> None:
    assert unread_calls(tokenizer_of(written)) == assumed


def test_calls_are_read_when_the_prompt_begins_the_reasoning() -> None:
    written = f'<tool_call>{{"name": "{NAME}", "arguments": {ARGUMENTS}}}</tool_call>'
    assert unread_calls(tokenizer_of(written, begun="<think>\n")) is None


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_calls_of_all_families_are_read(name: str) -> None:
    sources = {"default": FAMILY_TEMPLATES[name]}
    templates = ChatTemplates(sources, {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), templates)

    assert unread_calls(tokenizer) is None


def test_calls_are_not_unknown_when_the_template_takes_no_tools() -> None:
    templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {})
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), templates)

    assert unread_calls(tokenizer) is None


DESCRIBED = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {},
        "thinking": {"open": "(thinks)", "close": "(/thinks)"},
        "tool_calls": {
            "open": "(calls)",
            "close": "(/calls)",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_answer_is_parsed_as_transformers_does_when_the_model_describes_it() -> None:
    tokenizer = tokenizer_of(None, response_template=DESCRIBED)
    form = OutputFormat.of(tokenizer.chat_template_text, described=tokenizer.described_format)
    text = (
        "(thinks)hm(/thinks)So: "
        '(calls){"name": "get_weather", "arguments": {"city": "Paris"}}(/calls)'
        '(calls){"name": "add", "arguments": {"a": 1}}(/calls)'
    )
    expected = parse_response(text, DESCRIBED, prefix="<assistant>")

    for pieces in ([text], list(text)):
        parser = OutputParser(form, ParserOptions(tools=TOOLS))
        whole = Answer()
        for delta in [delta for piece in pieces for delta in parser.push(piece)]:
            whole.add(delta)
        for delta in parser.finish():
            whole.add(delta)
        assert whole.reasoning == expected["thinking"]
        assert whole.content.strip() == expected["content"].strip()
        assert [
            {"type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
            for name, arguments in whole.calls
        ] == expected["tool_calls"]
    assert unread_calls(tokenizer) is None


def test_calls_are_unknown_when_their_description_is_not_understood() -> None:
    calls = {"open": "(calls)", "content": "xml-inline", "content_args": {"tag_pattern": "x"}}
    tokenizer = tokenizer_of(None, response_template={"fields": {"tool_calls": calls}})

    assert unread_calls(tokenizer) == "json"


def test_notation_is_that_of_the_response_template_when_the_chat_template_shows_none() -> None:
    described = {
        "start_anchor": "<assistant>",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {"open_pattern": r"<\|tool_call_start\|>\[", "content": "json"},
        },
    }
    tokenizer = tokenizer_of(None, response_template=described)
    found = OutputFormat.of(tokenizer.chat_template_text)

    assert unread_calls(tokenizer) is None
    assert found.tool_calls is not None
    assert found.tool_calls.name == "lfm2"
    assert found.reasoning is not None
    assert found.reasoning.name == "think"
