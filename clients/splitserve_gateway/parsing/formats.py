"""Output formats of models: notations of tool calls and reasoning, detected by chat templates."""

from __future__ import annotations

import enum
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from splitserve_gateway.config import ReasoningParserName, ToolCallParserName
from splitserve_gateway.parsing.calls import CallReader, read_name, read_tagged_call
from splitserve_gateway.parsing.reader import NotAsExpected, Reading

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
