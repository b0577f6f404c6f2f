"""What the answer to a chat may look like, and who tells its parts apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from splitserve_client import Grammar
from splitserve_gateway.generation.serving import Serving
from splitserve_gateway.grammars.answer_plan import AnswerPlan, AnswerRules, plan_answer
from splitserve_gateway.grammars.checker import GrammarCheckUnavailable
from splitserve_gateway.grammars.lark import as_sent
from splitserve_gateway.grammars.requested import (
    GrammarRefused,
    RequestedGrammar,
    requested_grammar,
)
from splitserve_gateway.grammars.tools import ToolUse, tool_use
from splitserve_gateway.http.errors import ApiError, invalid
from splitserve_gateway.parsing.output_format import OutputFormat
from splitserve_gateway.parsing.reasoning import ReasoningState
from splitserve_gateway.schemas.chat import ChatFields, ChatRequest
from splitserve_gateway.schemas.sampling import GRAMMAR_FIELDS, SamplingFields

_RETRY_AFTER_S = 1.0


async def tools_of(body: ChatFields) -> ToolUse:
    """The tools of a chat. Raises ApiError."""
    if body.tools is None and body.tool_choice is None:
        return ToolUse()
    try:
        return await asyncio.to_thread(
            tool_use, body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls
        )
    except GrammarRefused as error:
        raise invalid(str(error), error.field, "invalid_value") from error


async def answer_plan(
    serving: Serving, body: ChatRequest, use: ToolUse, prompt_end: str
) -> AnswerPlan:
    """What the answer to `body` is held to, and how it is read. Raises ApiError."""
    config, tokenizer = serving.config, serving.tokenizer
    output_format = OutputFormat.of(
        tokenizer.chat_template_text, config.tool_call_parser, config.reasoning_parser
    )
    marks = output_format.reasoning
    state = ReasoningState.NOT_BEGUN if marks is None else marks.state_after(prompt_end)
    special_tokens = frozenset(tokenizer.special_tokens)
    with _refusals():
        requested = await _requested(body)
        rules = AnswerRules(output_format, requested, use, state, special_tokens)
        plan = await plan_answer(serving.checker_for(body.user), rules)
    if not body.skip_special_tokens:  # they are wanted
        plan = replace(plan, options=replace(plan.options, hidden=frozenset()))
    return plan


async def checked_grammar(serving: Serving, body: SamplingFields) -> Grammar | None:
    """The grammar that `body` asks for, without a chat around it. Raises ApiError."""
    checker = serving.checker_for(body.user)
    with _refusals():
        requested = await _requested(body)
        if requested is None:
            return None
        grammar = await checker.check(requested.field, requested.source)
        return await checker.check(requested.field, as_sent(grammar))


async def _requested(body: SamplingFields) -> RequestedGrammar | None:
    fields: Mapping[str, object] = {name: getattr(body, name) for name in GRAMMAR_FIELDS}
    if all(value is None for value in fields.values()):
        return None
    return await asyncio.to_thread(requested_grammar, fields)


@contextmanager
def _refusals() -> Iterator[None]:
    """Makes an ApiError of what is said of a grammar."""
    try:
        yield
    except GrammarRefused as error:
        raise invalid(str(error), error.field, "invalid_grammar") from error
    except GrammarCheckUnavailable as error:
        raise ApiError(
            503,
            "service_unavailable_error",
            str(error),
            code="grammar_check_unavailable",
            retry_after_s=_RETRY_AFTER_S,
        ) from error
