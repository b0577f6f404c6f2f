"""The grammar of an answer: what was requested, calls, reasoning before them; checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from splitserve_client.types import Grammar
from splitserve_gateway.grammars.calls import only_calls, text_and_calls
from splitserve_gateway.grammars.checker import GrammarChecker
from splitserve_gateway.grammars.lark import SpecialTokens, after_reasoning, either
from splitserve_gateway.grammars.requested import (
    ANY_OBJECT,
    MAX_GRAMMAR_BYTES,
    GrammarRefused,
    RequestedGrammar,
)
from splitserve_gateway.grammars.tools import Tool, ToolUse
from splitserve_gateway.parsing.output_format import OutputFormat
from splitserve_gateway.parsing.reasoning import ReasoningState


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What is asked of an answer, and how the model writes.

    `reasoning_state`: where the rendered prompt ends. `special_tokens`: ids of the model's special
    tokens by their texts.
    """

    output_format: OutputFormat
    requested: RequestedGrammar | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    reasoning_state: ReasoningState = ReasoningState.NOT_BEGUN
    special_tokens: SpecialTokens = field(default_factory=dict)


async def answer_grammar(checker: GrammarChecker, rules: AnswerRules) -> Grammar | None:
    """The grammar that holds an answer to `rules`; None if any text will do.

    - A call that has to be made is the whole answer; otherwise what was requested or calls are.
    - Of tools that may be called, `strict` ones are held to their schemas, where the notation
      allows to tell calls from text.
    - A schema that is not strict and cannot be compiled becomes any object.
    - All of this comes after the model's reasoning.

    Raises GrammarRefused.
    """
    requested = rules.requested
    answer = None
    if requested is not None and not rules.tool_use.must_call:
        answer = await checker.check(requested.field, requested.source)
    calls = await _calls(checker, rules, has_answer=answer is not None)
    if calls is not None:
        answer = calls if answer is None else either(answer, calls)
    if answer is None:
        return None
    marks = rules.output_format.reasoning
    if marks is not None:
        answer = after_reasoning(answer, marks, rules.reasoning_state, rules.special_tokens)
    where = requested.field if requested is not None and calls is None else "tools"
    return await checker.check(where, answer)


async def _calls(
    checker: GrammarChecker, rules: AnswerRules, *, has_answer: bool
) -> Grammar | None:
    use, tool_call_format = rules.tool_use, rules.output_format.tool_calls
    if not use.callable_tools or tool_call_format is None:
        if use.must_call:
            raise GrammarRefused("tool_choice", "the model's notation of calls is not known here")
        return None
    if not (use.must_call or has_answer or any(tool.is_strict for tool in use.callable_tools)):
        return None
    tools = await _with_schemas(checker, use.callable_tools)
    if use.must_call or has_answer:
        return only_calls(tools, tool_call_format, use.max_calls, rules.special_tokens)
    return text_and_calls(tools, tool_call_format, rules.special_tokens)


async def _with_schemas(checker: GrammarChecker, tools: Sequence[Tool]) -> list[Tool]:
    """The tools with schemas that compile, and fit together."""
    checked = []
    for tool in tools:
        try:
            await checker.check(tool.field, tool.schema)
            checked.append(tool)
        except GrammarRefused:
            if tool.is_strict:
                raise
            checked.append(replace(tool, schema=ANY_OBJECT))
    if sum(len(tool.schema.schema.encode()) for tool in checked) > MAX_GRAMMAR_BYTES // 2:
        checked = [tool if tool.is_strict else replace(tool, schema=ANY_OBJECT) for tool in checked]
    return checked
