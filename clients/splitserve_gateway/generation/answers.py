"""What the answer to a chat may look like, and who tells its parts apart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from splitserve_client import Grammar
from splitserve_gateway.generation.serving import Serving
from splitserve_gateway.grammars.checker import GrammarChecker, GrammarCheckUnavailable
from splitserve_gateway.grammars.preparation import AnswerRules, answer_grammar
from splitserve_gateway.grammars.requested import (
    GrammarRefused,
    RequestedGrammar,
    requested_grammar,
)
from splitserve_gateway.grammars.tools import ToolUse, tool_use
from splitserve_gateway.http.errors import ApiError, invalid
from splitserve_gateway.parsing.output_format import OutputFormat
from splitserve_gateway.parsing.output_parser import OutputParser, ParserOptions
from splitserve_gateway.parsing.reasoning import ReasoningState
from splitserve_gateway.schemas.chat import ChatFields, ChatRequest
from splitserve_gateway.schemas.sampling import GRAMMAR_FIELDS, SamplingFields

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answers to one chat are read.

    `shows_markers`: the parser needs special tokens in the text. `grammar`: None if any text will
    do.
    """

    output_format: OutputFormat
    options: ParserOptions
    grammar: Grammar | None = None
    shows_markers: bool = False

    @property
    def has_parts(self) -> bool:
        """Whether an answer may have more than content."""
        options = self.options
        return bool(self.output_format.reasoning or options.tools or options.hidden)

    def new_parser(self) -> OutputParser:
        """For one choice."""
        return OutputParser(self.output_format, self.options)


async def tools_of(body: ChatFields) -> ToolUse:
    """The tools of a chat. Raises ApiError."""
    if body.tools is None and body.tool_choice is None:
        return ToolUse()
    try:
        return await asyncio.to_thread(
            tool_use, body.tools, body.tool_choice, body.parallel_tool_calls
        )
    except GrammarRefused as error:
        raise invalid(str(error), error.field, "invalid_value") from error


async def answer_form(
    serving: Serving, body: ChatRequest, use: ToolUse, prompt_end: str
) -> AnswerForm:
    """What the answer to `body` is held to, and how it is read. Raises ApiError."""
    config, tokenizer = serving.config, serving.tokenizer
    output_format = OutputFormat.of(
        tokenizer.chat_template_text, config.tool_call_parser, config.reasoning_parser
    )
    marks = output_format.reasoning
    state = ReasoningState.NOT_BEGUN if marks is None else marks.state_after(prompt_end)
    special_tokens = tokenizer.special_tokens
    try:
        requested = await _requested(body)
        rules = AnswerRules(output_format, requested, use, state, special_tokens)
        grammar = await answer_grammar(serving.checker, rules)
    except GrammarRefused as error:
        raise invalid(str(error), error.field, "invalid_grammar") from error
    except GrammarCheckUnavailable as error:
        raise _check_unavailable(error) from error
    markers = output_format.marker_texts
    if not use.callable_tools:
        markers = frozenset() if marks is None else frozenset((marks.opener, marks.closer))
    shows_markers = not markers.isdisjoint(special_tokens)
    hides = shows_markers and body.skip_special_tokens
    options = ParserOptions(
        tools=use.parameters,
        max_calls=use.max_calls,
        streams_arguments=use.must_call,
        starts_in_reasoning=state is ReasoningState.OPEN,
        hidden=frozenset(special_tokens) if hides else frozenset(),
    )
    return AnswerForm(output_format, options, grammar, shows_markers)


async def checked_grammar(checker: GrammarChecker, body: SamplingFields) -> Grammar | None:
    """The grammar that `body` asks for, without a chat around it. Raises ApiError."""
    try:
        requested = await _requested(body)
        if requested is None:
            return None
        return await checker.check(requested.field, requested.source)
    except GrammarRefused as error:
        raise invalid(str(error), error.field, "invalid_grammar") from error
    except GrammarCheckUnavailable as error:
        raise _check_unavailable(error) from error


async def _requested(body: SamplingFields) -> RequestedGrammar | None:
    fields: Mapping[str, object] = {name: getattr(body, name) for name in GRAMMAR_FIELDS}
    if all(value is None for value in fields.values()):
        return None
    return await asyncio.to_thread(requested_grammar, fields)


def _check_unavailable(error: GrammarCheckUnavailable) -> ApiError:
    return ApiError(
        503,
        "service_unavailable_error",
        str(error),
        code="grammar_check_unavailable",
        retry_after_s=_RETRY_AFTER_S,
    )
