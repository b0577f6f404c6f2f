"""Plan of an answer: grammar (requested format, tool calls, reasoning) and parser options."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from splitserve_gateway.grammars.answer_check import AnswerCheck, AnswerFinding
from splitserve_gateway.grammars.call_grammars import (
    is_spelled,
    only_calls,
    text_and_calls,
    texts_of,
)
from splitserve_gateway.grammars.checker import (
    ANY_OBJECT,
    GrammarRefused,
    RequestedGrammar,
    TenantChecker,
)
from splitserve_gateway.grammars.lark import after_reasoning, as_sent, either
from splitserve_gateway.grammars.tools import Tool, ToolUse
from splitserve_grammars import MAX_GRAMMAR_BYTES
from splitserve_text import (
    JSON,
    Draw,
    Grammar,
    JsonSchema,
    OutputFormat,
    OutputParser,
    ParserOptions,
    ReasoningState,
)

_MAX_REFUSED = 3  # each refused schema may take the full compile time


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """Constraints on an answer, and the model's output notation.

    `reasoning_state`: reasoning state at the end of the rendered prompt. `special_tokens`: texts of
    the tokens that detokenizers skip. Grammars cannot match these tokens, whose text is empty
    there.
    """

    output_format: OutputFormat
    requested: RequestedGrammar | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    reasoning_state: ReasoningState = ReasoningState.NOT_BEGUN
    special_tokens: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Grammar of an answer (None if any text is allowed), and how its text is parsed.

    `ignored`: paths of parts of schemas that the grammar does not enforce. `check`: of the finished
    answer against those schemas; None without any.
    """

    output_format: OutputFormat
    options: ParserOptions
    grammar: Grammar | None = None
    ignored: tuple[str, ...] = ()
    check: AnswerCheck | None = None

    @property
    def shows_markers(self) -> bool:
        """Whether the parser needs the text of special tokens."""
        return bool(self.options.hidden)

    @property
    def has_parts(self) -> bool:
        """Whether an answer may have reasoning, tool calls or hidden tokens besides content."""
        options = self.options
        return bool(self.output_format.reasoning or options.tools or options.hidden)

    def new_parser(self, draw: Draw = secrets.choice) -> OutputParser:
        """Returns a parser for one answer. `draw`: chooses the characters of calls' ids."""
        return OutputParser(self.output_format, replace(self.options, draw=draw))

    def new_finding(self) -> AnswerFinding:
        """Returns the check of one answer, which still lacks the answer."""
        return AnswerFinding(self.check)


async def plan_answer(checker: TenantChecker, rules: AnswerRules) -> AnswerPlan:
    """Plans the grammar and the parsing of an answer under `rules`.

    - A required call is the whole answer; otherwise the answer is the requested format or calls.
    - Calls of `strict` tools follow their schemas if the notation tells calls from text; otherwise
      they are checked afterwards. All tools follow their schemas if some tools may not be called.
    - Of a schema that is not strict, what does not compile is ignored; of a tool's schema
      everything, if that does not help.
    - The model's reasoning comes before all of this. A model whose reasoning marks are special
      tokens does not reason under a grammar.
    - Calls whose notation has special tokens are written as JSON under a grammar.

    Raises GrammarRefused and GrammarCheckUnavailable.
    """
    requested, use = rules.requested, rules.tool_use
    answer: Grammar | None = None
    ignored: tuple[str, ...] = ()
    content: str | None = None
    if requested is not None and not use.must_call:
        checked = await checker.check_requested(requested)
        answer, ignored = checked.grammar, checked.ignored
        content = checked.unenforced
    form, calls = await _calls(checker, rules, has_answer=answer is not None)
    if calls.grammar is not None:
        answer = calls.grammar if answer is None else either(answer, calls.grammar)
    state, marks = rules.reasoning_state, form.reasoning
    if answer is not None and marks is not None:
        if rules.special_tokens.isdisjoint(marks.marker_texts):
            answer = after_reasoning(answer, marks, state)
        else:
            state = ReasoningState.CLOSED
    if answer is not None:
        where = requested.field if requested is not None and calls.grammar is None else "tools"
        answer = await checker.check(where, as_sent(answer))
    read = form if use.callable_tools else replace(form, tool_calls=None)
    options = ParserOptions(
        tools=use.parameters,
        barred=use.barred,
        max_calls=use.max_calls,
        starts_in_reasoning=state is ReasoningState.OPEN,
        hidden=rules.special_tokens if rules.special_tokens & read.marker_texts else frozenset(),
    )
    has_check = content is not None or calls.arguments
    check = AnswerCheck(checker, content, calls.arguments) if has_check else None
    return AnswerPlan(read, options, answer, ignored + calls.ignored, check)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Tool calls of an answer: `grammar`, None if nothing constrains them.

    `ignored`: paths of parts of tools' schemas that it does not enforce. `arguments`: those schemas
    by tool name.
    """

    grammar: Grammar | None = None
    ignored: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)


async def _calls(
    checker: TenantChecker, rules: AnswerRules, *, has_answer: bool
) -> tuple[OutputFormat, _Calls]:
    """Returns the notation of calls and their grammar.

    Raises GrammarRefused if a call is required and the model's notation is unknown.
    """
    use, form = rules.tool_use, rules.output_format
    if form.tool_calls is None:
        if use.must_call:
            raise GrammarRefused("tool_choice", "tool calls of this model cannot be parsed")
        return form, _Calls()
    is_spoken = is_spelled(form.tool_calls) and rules.special_tokens.isdisjoint(
        texts_of(form.tool_calls)
    )
    if use.callable_tools and (use.must_call or has_answer):
        notation = form.tool_calls
        with suppress(GrammarRefused):
            made = await _compilable(
                checker,
                use.callable_tools,
                lambda tools: only_calls(tools, notation, use.max_calls) if is_spoken else None,
            )
            if made.grammar is not None:
                return form, made
        made = await _compilable(
            checker, use.callable_tools, lambda tools: only_calls(tools, JSON, use.max_calls)
        )
        return replace(form, tool_calls=JSON), made
    if is_spoken and (use.barred or any(tool.is_strict for tool in use.callable_tools)):
        notation = form.tool_calls
        try:
            made = await _compilable(
                checker, use.callable_tools, lambda tools: text_and_calls(tools, notation)
            )
        except GrammarRefused as refused:
            if refused.field != "tools":
                raise
            made = _Calls()
        if made.grammar is not None:
            return form, made
    return form, _unenforced(use.callable_tools)


def _unenforced(tools: Sequence[Tool]) -> _Calls:
    """Returns calls without a grammar, whose `strict` schemas are checked afterwards."""
    strict = [tool for tool in tools if tool.is_strict]
    ignored = tuple(f"{tool.field.removesuffix('parameters')}strict" for tool in strict)
    return _Calls(None, ignored, {tool.name: tool.schema.schema for tool in strict})


async def _compilable(
    checker: TenantChecker,
    tools: Sequence[Tool],
    make: Callable[[Sequence[Tool]], Grammar | None],
) -> _Calls:
    """Returns the grammar that `make` builds, with looser schemas for those that do not compile.

    Without a grammar if `make` returns None. Raises GrammarRefused for a strict schema that does
    not compile, and for `tools` if they compile alone, but not together.
    """
    kept = [_KeptTool(tool) for tool in tools]
    if sum(len(tool.schema.schema.encode()) for tool in tools) > MAX_GRAMMAR_BYTES // 2:
        kept = [each if each.tool.is_strict else each.loosened() for each in kept]
    made = await asyncio.to_thread(make, [each.tool for each in kept])
    if made is None:
        return _Calls()
    with suppress(GrammarRefused):
        return _calls_of(await checker.check("tools", made), kept)
    kept = await _without_refused(checker, kept)
    made = await asyncio.to_thread(make, [each.tool for each in kept])
    return _Calls() if made is None else _calls_of(await checker.check("tools", made), kept)


@dataclass(frozen=True, slots=True)
class _KeptTool:
    """Tool as a grammar enforces it.

    `ignored`: paths of parts of its schema that are not enforced. `unenforced`: that schema as JSON
    text.
    """

    tool: Tool
    ignored: tuple[str, ...] = ()
    unenforced: str | None = None

    def loosened(self, schema: JsonSchema = ANY_OBJECT, ignored: Sequence[str] = ()) -> _KeptTool:
        """Returns the tool with the looser `schema`, which ignores the whole schema by default."""
        if self.unenforced is not None:
            return self
        tool = self.tool
        return _KeptTool(
            replace(tool, schema=schema), tuple(ignored) or (tool.field,), tool.schema.schema
        )


def _calls_of(grammar: Grammar, kept: Sequence[_KeptTool]) -> _Calls:
    ignored = tuple(path for each in kept for path in each.ignored)
    arguments = {each.tool.name: each.unenforced for each in kept if each.unenforced is not None}
    return _Calls(grammar, ignored, arguments)


async def _without_refused(checker: TenantChecker, tools: Sequence[_KeptTool]) -> list[_KeptTool]:
    """Checks the schema of each tool alone; replaces refused ones by looser ones, or any object.

    After `_MAX_REFUSED` refusals only strict schemas are checked, and all others become any object.
    Raises GrammarRefused for a strict schema.
    """
    kept: list[_KeptTool] = []
    num_refused = 0
    for each in tools:
        tool = each.tool
        if not tool.is_strict and num_refused >= _MAX_REFUSED:
            kept.append(each.loosened())
            continue
        requested = RequestedGrammar(tool.field, tool.schema, tool.loose_schema)
        try:
            checked = await checker.check_requested(requested)
        except GrammarRefused:
            if tool.is_strict:
                raise
            kept.append(each.loosened())
        else:
            assert isinstance(checked.grammar, JsonSchema), "the check returns what it was given"
            is_same = checked.unenforced is None
            kept.append(each if is_same else each.loosened(checked.grammar, checked.ignored))
        num_refused += kept[-1] is not each
    return kept
