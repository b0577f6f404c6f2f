"""Parser of answers: notations of tool calls and reasoning, and the parts of a text."""

from __future__ import annotations

import enum
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from splitserve_text.answer_reader import (
    AnswerWriter,
    Delta,
    NotAsExpected,
    Reader,
    Reading,
    ReasoningDelta,
    stops_of,
)
from splitserve_text.tool_calls import CallReader, ToolSchemas, read_name, read_tagged_call

ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral", "json", "none"]
ReasoningParserName = Literal["auto", "think", "mistral", "none"]

_ID_CHARS = string.ascii_letters + string.digits
_CALL_ID = re.compile(r"[0-9A-Za-z_-]*")


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Notation of tool calls in a family of models.

    `opener`: text that announces calls; "" without one. `markers`: all texts of the notation that
    may be special tokens of a model. `read`: reads the text after the opener. `may_be_bare`: calls
    may also stand at the very beginning of an answer without the opener.
    """

    name: str
    opener: str
    markers: tuple[str, ...]
    read: Callable[[CallReader, bool], Reading[None]]
    may_be_bare: bool = False
    id_prefix: str = "call_"
    id_length: int = 24

    def new_id(self) -> str:
        """Returns a new unique call id."""
        return self.id_prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(self.id_length))


def _read_hermes(calls: CallReader, is_marked: bool) -> Reading[None]:
    reader = calls.reader

    def closing() -> Reading[None]:
        yield from reader.skip_space()
        # Some models forget to close before they open again, or end.
        if (yield from reader.one_of(("</tool_call>",))) is None:
            following = yield from reader.peek(len("<tool_call>"))
            if following not in ("", "<tool_call>"):
                raise NotAsExpected

    yield from reader.skip_space()
    if (yield from reader.peek()) == "<":
        name, arguments = yield from read_tagged_call(reader, calls.tools)
        yield from closing()
        calls.write(name, arguments)
    else:
        yield from calls.read_object(is_marked=is_marked, then=closing)


def _read_mistral(calls: CallReader, is_marked: bool) -> Reading[None]:
    reader = calls.reader
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char in ("[", "{"):
        yield from _read_objects(calls, is_marked)
        return
    name = yield from read_name(reader)
    if (yield from reader.one_of(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
        yield from reader.take(_CALL_ID)
        yield from reader.expect("[ARGS]")
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        raise NotAsExpected
    yield from calls.read_arguments_of(name)


def _read_objects(calls: CallReader, is_marked: bool) -> Reading[None]:
    """Reads an array of calls, or consecutive calls; text after consecutive calls is content."""
    reader = calls.reader
    yield from reader.skip_space()
    is_array = (yield from reader.peek()) == "["
    if is_array:
        reader.skip(1)
        yield from reader.skip_space()
    while True:
        yield from calls.read_object(is_marked=is_marked, then=_nothing)
        yield from reader.skip_space()
        char = yield from reader.peek()
        if char == "]" and is_array:
            reader.skip(1)
            return
        if char == "":
            return
        if char in (",", ";"):
            reader.skip(1)
            yield from reader.skip_space()
        elif is_array or char != "{":
            raise NotAsExpected


def _nothing() -> Reading[None]:
    yield from ()


HERMES = ToolCallFormat("hermes", "<tool_call>", ("<tool_call>", "</tool_call>"), _read_hermes)
LLAMA3_JSON = ToolCallFormat(
    "llama3_json", "<|python_tag|>", ("<|python_tag|>",), _read_objects, may_be_bare=True
)
# Mistral's templates accept only ids of nine letters and digits.
MISTRAL = ToolCallFormat(
    "mistral",
    "[TOOL_CALLS]",
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    _read_mistral,
    id_prefix="",
    id_length=9,
)
# Spelling of later Mistral models; the reader accepts both spellings.
MISTRAL_ARGS = replace(MISTRAL, name="mistral_args")
JSON = ToolCallFormat("json", "", (), _read_objects, may_be_bare=True)

FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, JSON)}


# -- Detection of a model's notations by its chat template -----------------------------------------

# Texts in chat templates that reveal the notation, the most specific first.
_TOOL_CALL_MARKERS = (
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA3_JSON),
    ('"parameters": dictionary of argument name', LLAMA3_JSON),
)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Notations of calls and reasoning; None if the model has none, or parsing is off."""

    tool_calls: ToolCallFormat | None
    reasoning: ReasoningMarks | None

    @classmethod
    def of(
        cls,
        chat_template: str,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
    ) -> OutputFormat:
        """Returns the notations by parser name; `auto` detects them by the chat template.

        With `auto`, calls are JSON if the template shows no notation of calls.
        """
        tool_calls = FORMATS.get(tool_call_parser)
        if tool_call_parser == "auto":
            tool_calls = _tool_calls_of(chat_template)
        elif tool_calls is MISTRAL and "[ARGS]" in chat_template:
            tool_calls = MISTRAL_ARGS
        reasoning = REASONING_MARKS.get(reasoning_parser)
        if reasoning_parser == "auto":
            reasoning = _reasoning_of(chat_template)
        return cls(tool_calls, reasoning)

    @property
    def marker_texts(self) -> frozenset[str]:
        """Texts that the parser must see, even if they are special tokens of the model."""
        calls = self.tool_calls.markers if self.tool_calls else ()
        marks = (self.reasoning.opener, self.reasoning.closer) if self.reasoning else ()
        return frozenset([*calls, *marks])


def _tool_calls_of(template: str) -> ToolCallFormat:
    return next((found for text, found in _TOOL_CALL_MARKERS if text in template), JSON)


def _reasoning_of(template: str) -> ReasoningMarks | None:
    for marks in (MISTRAL_THINK, THINK):
        if marks.opener in template or marks.closer in template:
            return marks
    return None


# -- Marks of reasoning ----------------------------------------------------------------------------


class ReasoningState(enum.Enum):
    """State of the model's reasoning when its answer begins."""

    NOT_BEGUN = "not_begun"
    OPEN = "open"  # the answer begins within reasoning
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Texts before and after reasoning, which stands at the beginning of an answer."""

    name: str
    opener: str
    closer: str

    def state_after(self, prompt: str) -> ReasoningState:
        """Returns the reasoning state at the end of a rendered prompt."""
        end = prompt[-1024:].rstrip()
        if end.endswith(self.opener):
            return ReasoningState.OPEN
        return ReasoningState.CLOSED if end.endswith(self.closer) else ReasoningState.NOT_BEGUN


THINK = ReasoningMarks("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningMarks("mistral", "[THINK]", "[/THINK]")

REASONING_MARKS = {each.name: each for each in (THINK, MISTRAL_THINK)}


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Options of the parser of an answer.

    - `tools`: parameter schemas by tool name; without tools no calls are parsed.
    - `barred`: names of tools that the model knows and may not call; such calls are content.
    - `max_calls`: further calls are dropped; None for all.
    - `streams_arguments`: a grammar guarantees the format, so arguments are written as they arrive.
      They are cut where the answer is cut.
    - `starts_in_reasoning`: the prompt ends within reasoning (`ReasoningMarks.state_after`).
    - `hidden`: texts of special tokens that are in the text only because the parser needs some of
      them (`OutputFormat.marker_texts`). They are dropped from content.
    - `new_id`: makes the ids of calls; None for random ids in the form of the notation.
    """

    tools: ToolSchemas = field(default_factory=dict)
    barred: frozenset[str] = frozenset()
    max_calls: int | None = None
    streams_arguments: bool = False
    starts_in_reasoning: bool = False
    hidden: frozenset[str] = frozenset()
    new_id: Callable[[], str] | None = None


class OutputParser:
    """Splits an answer into parts, independent of the cuts between pieces of its text.

    - Text that looks like a call and is none is content, with its markers. Nothing raises.
    - A call is written when it is complete, so its arguments are certainly a JSON object. A call
      cut by the end of the answer is content (with `streams_arguments` it is a cut call).
    - White space around calls, and right after a marker of reasoning, is dropped.

    `num_reasoning_chars`: length of the reasoning with its marks; None until reasoning has ended.
    Memory is bounded by an unfinished call, which is part of the answer; time is linear.
    """

    def __init__(self, output_format: OutputFormat, options: ParserOptions) -> None:
        tool_calls = output_format.tool_calls if options.tools else None
        new_id = options.new_id or (tool_calls.new_id if tool_calls else str)
        self._reader = Reader()
        self._format = tool_calls
        self._reasoning = output_format.reasoning
        self.num_reasoning_chars: int | None = None if self._reasoning else 0
        self._starts_in_reasoning = options.starts_in_reasoning
        self._hidden = options.hidden
        self._writer = AnswerWriter(
            new_id, max_calls=options.max_calls, hidden=stops_of(options.hidden)
        )
        self._calls = CallReader(
            self._reader,
            self._writer,
            options.tools,
            options.barred,
            options.streams_arguments,
            unwritten=[],
        )
        self._parsing = self._parse()
        self._advance()

    def push(self, text: str) -> list[Delta]:
        """Parses the next text; returns the deltas that are now certain."""
        self._reader.feed(text)
        self._advance()
        return self._writer.take()

    def finish(self) -> list[Delta]:
        """Ends the text; returns the remaining deltas."""
        self._reader.end()
        self._advance()
        self._writer.finish()
        return self._writer.take()

    def _advance(self) -> None:
        next(self._parsing, None)
        self._reader.flush()

    def _parse(self) -> Reading[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._format is not None and self._format.may_be_bare:
            yield from self._attempt(self._format, "")
        opener = self._format.opener if self._format else ""
        stops = stops_of(self._hidden | {opener} if opener else self._hidden)
        while (stop := (yield from self._reader.until(stops, self._writer.content))) is not None:
            if self._format is not None and stop == opener:
                yield from self._attempt(self._format, opener)

    def _attempt(self, tool_call_format: ToolCallFormat, opener: str) -> Reading[None]:
        unwritten = self._calls.unwritten
        unwritten[:] = [opener] if opener else []
        with self._reader.recording(unwritten.append):
            try:
                yield from tool_call_format.read(self._calls, bool(opener))
                is_call = True
            except NotAsExpected:
                is_call = False
        if not is_call:
            self._writer.not_a_call("".join(unwritten))
        unwritten.clear()

    def _read_reasoning(self, marks: ReasoningMarks) -> Reading[None]:
        begin: list[str] = []
        with self._reader.recording(begin.append):
            yield from self._reader.skip_space()
        opened = yield from self._reader.one_of((marks.opener,))
        if opened is None and not self._starts_in_reasoning:
            if begin:
                self._writer.content("".join(begin))
            self.num_reasoning_chars = 0
            return
        yield from self._reader.skip_space()
        stops = stops_of(self._hidden | {marks.closer})
        while (stop := (yield from self._reader.until(stops, self._reason))) is not None:
            if stop == marks.closer:
                break
        self.num_reasoning_chars = self._reader.num_read
        yield from self._reader.skip_space()

    def _reason(self, text: str) -> None:
        self._writer.deltas.append(ReasoningDelta(text))
