"""Notations of chat templates, and the end of reasoning."""

from __future__ import annotations

from typing import get_args

import pytest

from splitserve_options import GATEWAY_OPTIONS
from splitserve_text import (
    MISTRAL_THINK,
    REASONING_MARKS,
    THINK,
    OutputFormat,
    ReasoningParserName,
    ReasoningState,
    ToolCallParserName,
)
from tests.unit.text.parsing.answers import answer


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{%- if tools %}<tools>...<tool_call>{{ x }}</tool_call>", "hermes", None),
        ("<tool_call><function=example>...<think>", "qwen3_coder", "think"),
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
        ("'<｜tool▁calls▁begin｜>' ... '\\n```json\\n'", "deepseek_v3", None),  # noqa: RUF001
        ("'<｜tool▁calls▁begin｜>' '<think>'", "deepseek", "think"),  # noqa: RUF001
        ("{%- set dsml = '｜DSML｜' %}</think>", "deepseek_dsml", "think"),  # noqa: RUF001
        ("<|tool_call_begin|><|im_middle|>", "kimi_k2", None),
        ("<tool_call>{name}<arg_key></think>", "glm", "think"),
        ("'<minimax:tool_call>' <think> <response>", "minimax", "think"),
        ("<tool_calls> <think> <answer>", "tool_calls_tag", "think_answer"),
        ("'<seed:tool_call>' '<seed:think>' <function=x>", "seed_oss", "seed"),
        ("<|tool_call>call: <|channel>", "gemma4", "gemma4"),
        ("<|START_ACTION|><|START_THINKING|>", "command", "command"),
        ("<|tool_call|> Here is my thought process:", "granite", "granite"),
        ("<|start|>assistant<|channel|>", "harmony", "harmony"),
        ("List of tools: [", "lfm2", None),
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


@pytest.mark.parametrize(
    ("name", "prompt", "state"),
    [
        ("apriel", "<|begin_assistant|>\nHere are my reasoning steps:\n", ReasoningState.OPEN),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", ReasoningState.CLOSED),
        ("command", "<|CHATBOT_TOKEN|><|START_THINKING|>", ReasoningState.OPEN),
        ("command", "<|START_THINKING|><|END_THINKING|>", ReasoningState.CLOSED),
        ("think_answer", "<|hy_Assistant|><think>\n\n</think>\n", ReasoningState.CLOSED),
        ("harmony", "<|start|>assistant", ReasoningState.NOT_BEGUN),
    ],
)
def test_state_of_reasoning_is_that_of_the_prompt_in_each_family(
    name: str, prompt: str, state: ReasoningState
) -> None:
    assert REASONING_MARKS[name].state_after(prompt) is state


CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nHi\n", False, "hm\n", "Hi\n"),
        ("\n<think>hm</think>Hi", False, "hm", "Hi"),
        ("hm</think>Hi", True, "hm", "Hi"),
        ("\nhm", True, "hm", ""),
        ("<think>hm</think>Hi", True, "hm", "Hi"),
        ("<think>hm", False, "hm", ""),
        ("<think>hm</thin", False, "hm</thin", ""),
        ("<think></think>", False, "", ""),
        ("Hi <think>hm</think>", False, "", "Hi <think>hm</think>"),
        ("<thinking>", False, "", "<thinking>"),
        ("  Hi", False, "", "  Hi"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<think>a<think>b</think>c", False, "a<think>b", "c"),
        (" ", False, "", " "),
        ("", True, "", ""),
    ],
)
def test_reasoning_ends_where_the_model_says(
    text: str, starts_inside: bool, reasoning: str, content: str
) -> None:
    whole = answer(text, "none", "think", starts_in_reasoning=starts_inside)

    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert answer(list(text), "none", "think", starts_in_reasoning=starts_inside) == whole


def test_call_is_found_behind_reasoning_and_not_within() -> None:
    whole = answer(f"<think>I could {CALL}</think>\n{CALL}", "hermes", "think")

    assert (whole.reasoning, whole.calls) == (f"I could {CALL}", [("add", "{}")])
    assert whole.content == ""


def test_call_is_reasoning_when_reasoning_never_ends() -> None:
    whole = answer(f"<think>I call.{CALL}", "hermes", "think")

    assert (whole.reasoning, whole.calls, whole.content) == (f"I call.{CALL}", [], "")


KIMI_CALL = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.mark.parametrize("opener", ["<|tool_calls_section_begin|>", ""])
@pytest.mark.parametrize(
    ("after", "reasoning", "content"),
    [
        ("", "I call. ", ""),
        ("</think>", "I call. ", ""),
        ("</think>\n\nHi", "I call. ", "Hi"),
        ("Hi</think>", "I call. ", "Hi</think>"),
        ("<think>Now.</think>", "I call. Now.", ""),
    ],
)
def test_call_of_kimi_ends_reasoning_when_its_end_is_missing(
    opener: str, after: str, reasoning: str, content: str
) -> None:
    closer = opener.replace("begin", "end")
    text = f"I call. {opener}{KIMI_CALL}{closer}{after}"
    whole = answer(text, "kimi_k2", "think", starts_in_reasoning=True)

    assert (whole.reasoning, whole.calls) == (reasoning, [("add", "{}")])
    assert whole.content == content
    assert answer(list(text), "kimi_k2", "think", starts_in_reasoning=True) == whole


HARMONY_HEADER = " to=functions.add<|channel|>commentary"


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (HARMONY_HEADER + " json<|message|>{}<|call|>", ["add"], ""),
        (HARMONY_HEADER.strip() + " <|constrain|>json<|message|>{}<|call|>", ["add"], ""),
        (
            f"{HARMONY_HEADER}<|message|>{{}}<|call|><|start|>assistant{HARMONY_HEADER}"
            "<|message|>{}<|call|>",
            ["add", "add"],
            "",
        ),
        (HARMONY_HEADER + "<|message|>no JSON", [], f"{HARMONY_HEADER}<|message|>no JSON"),
        (" to=the point", [], " to=the point"),
        (" to be", [], " to be"),
        (" t", [], " t"),
    ],
)
def test_call_of_gpt_oss_begins_with_its_tool_when_the_prompt_ends_in_a_header(
    text: str, calls: list[str], content: str
) -> None:
    whole = answer(text, "harmony", "harmony")

    assert whole.calls == [(name, "{}") for name in calls]
    assert whole.content == content
    assert answer(list(text), "harmony", "harmony") == whole


def test_bare_call_is_found_behind_reasoning() -> None:
    whole = answer('<think>hm</think>{"name": "add", "arguments": {}}', "json", "think")

    assert (whole.reasoning, whole.calls) == ("hm", [("add", "{}")])


def test_markers_of_reasoning_may_be_hidden_tokens() -> None:
    hidden = frozenset(["[THINK]", "[/THINK]", "</s>"])
    whole = answer("[THINK]hm[THINK]m[/THINK]Hi[/THINK]</s>", "none", "mistral", hidden=hidden)

    assert (whole.reasoning, whole.content) == ("hmm", "Hi")


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", ReasoningState.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningState.CLOSED),
        ("<|im_start|>assistant\n", ReasoningState.NOT_BEGUN),
        ("say <think> twice<|im_end|>", ReasoningState.NOT_BEGUN),
    ],
)
def test_state_of_reasoning_is_what_the_prompt_ends_in(prompt: str, state: ReasoningState) -> None:
    assert THINK.state_after(prompt) is state
    assert MISTRAL_THINK.state_after(prompt) is ReasoningState.NOT_BEGUN
