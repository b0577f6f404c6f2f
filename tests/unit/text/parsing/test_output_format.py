"""Which notation a template speaks."""

from __future__ import annotations

from typing import get_args

import pytest

from splitserve_options.gateway_table import GATEWAY_OPTIONS
from splitserve_text.output_parser import OutputFormat, ReasoningParserName, ToolCallParserName


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{%- if tools %}<tools>...<tool_call>{{ x }}</tool_call>", "hermes", None),
        ("<tool_call><function=example>...<think>", "hermes", "think"),
        ("{{ '<think>' }}{% if tools %}<tool_call>", "hermes", "think"),
        ("{%- if '</think>' in content %}", "json", "think"),
        ("{{ '<|python_tag|>' }} ipython", "llama3_json", None),
        (
            '{"name": function name, "parameters": dictionary of argument name and its value}',
            "llama3_json",
            None,
        ),
        ("[AVAILABLE_TOOLS][TOOL_CALLS] [{", "mistral", None),
        ("[TOOL_CALLS]name[ARGS][THINK]", "mistral_args", "mistral"),
        ("{% for message in messages %}{{ message.content }}", "json", None),
    ],
)
def test_format_goes_by_the_template_when_nothing_is_said(
    template: str, calls: str, reasoning: str | None
) -> None:
    found = OutputFormat.of(template)

    assert found.tool_calls is not None
    assert found.tool_calls.name == calls
    assert (found.reasoning.name if found.reasoning else None) == reasoning


@pytest.mark.parametrize("calls", ["hermes", "llama3_json", "mistral", "json", "none"])
@pytest.mark.parametrize("reasoning", ["think", "mistral", "none"])
def test_format_is_the_named_one_when_named(
    calls: ToolCallParserName, reasoning: ReasoningParserName
) -> None:
    found = OutputFormat.of("<tool_call><think>[TOOL_CALLS]", calls, reasoning)

    assert (found.tool_calls.name if found.tool_calls else "none") == calls
    assert (found.reasoning.name if found.reasoning else "none") == reasoning


def test_markers_are_those_of_calls_and_reasoning() -> None:
    assert OutputFormat.of("<tool_call><think>").marker_texts == {
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
    }
    assert OutputFormat.of("", "none").marker_texts == frozenset()


def test_spelling_of_mistral_goes_by_the_template_even_when_named() -> None:
    found = OutputFormat.of("[TOOL_CALLS]name[ARGS]", "mistral").tool_calls

    assert found is not None
    assert found.name == "mistral_args"


def test_options_have_the_names_of_the_parsers() -> None:
    choices = {option.name: option.choices for option in GATEWAY_OPTIONS}

    assert choices["tool-call-parser"] == get_args(ToolCallParserName)
    assert choices["reasoning-parser"] == get_args(ReasoningParserName)
