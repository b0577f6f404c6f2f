"""Chat templates whose tool calls cannot be read."""

from __future__ import annotations

import pytest
import tokenizers

from splitserve_text import ChatTemplates, OutputFormat, Tokenizer, has_unknown_calls

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}CALLS{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}WRITTEN{% endfor %}"
NAME = "{{ c.function.name }}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
GENERATION = "{% if add_generation_prompt %}<assistant>{% endif %}"


def tokenizer_of(written: str | None, *, response_template: object = None) -> Tokenizer:
    calls = "" if written is None else CALLS.replace("WRITTEN", written)
    source = TOOLS + CHAT.replace("CALLS", calls) + GENERATION
    templates = ChatTemplates({"default": source}, {}, response_template=response_template)
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), templates)


@pytest.mark.parametrize(
    ("written", "is_unknown"),
    [
        (f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}', False),
        (f'<tool_call>{{"name": "{NAME}", "arguments": {ARGUMENTS}}}</tool_call>', False),
        (f"CALL {NAME} WITH {ARGUMENTS} END", True),
        (None, True),
    ],
)
def test_calls_are_unknown_when_the_template_writes_them_its_own_way(
    written: str | None, is_unknown: bool
) -> None:
    assert has_unknown_calls(tokenizer_of(written)) is is_unknown


def test_calls_are_not_unknown_when_the_template_takes_no_tools() -> None:
    templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {})
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), templates)

    assert not has_unknown_calls(tokenizer)


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

    assert not has_unknown_calls(tokenizer)
    assert found.tool_calls is not None
    assert found.tool_calls.name == "lfm2"
    assert found.reasoning is not None
    assert found.reasoning.name == "think"
