"""Parser of answers: notations of tool calls and reasoning, and the parts of a text."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
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
from splitserve_text.call_formats import (
    FORMATS,
    HARMONY,
    HERMES,
    JSON,
    Draw,
    ToolCallFormat,
    spelled_in,
    tool_calls_of,
)
from splitserve_text.channels import ChannelReader
from splitserve_text.reasoning import (
    HARMONY_THINK,
    REASONING_MARKS,
    ReasoningMarks,
    reasoning_of,
)
from splitserve_text.tool_calls import CallReader, ToolSchemas

ToolCallParserName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "llama4",
    "function_tag",
    "mistral",
    "deepseek",
    "deepseek_dsml",
    "kimi_k2",
    "glm",
    "hunyuan",
    "minimax",
    "tool_calls_tag",
    "nemotron",
    "gemma3",
    "gemma4",
    "functiongemma",
    "phi4_mini",
    "granite",
    "command",
    "command_r",
    "internlm2",
    "seed_oss",
    "lfm2",
    "olmo3",
    "apertus",
    "gigachat",
    "harmony",
    "json",
    "none",
]
ReasoningParserName = Literal[
    "auto",
    "think",
    "think_answer",
    "mistral",
    "seed",
    "command",
    "granite",
    "gemma4",
    "kimi_vl",
    "apriel",
    "harmony",
    "none",
]


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
        described: OutputFormat | None = None,
    ) -> OutputFormat:
        """Returns the notations by parser name; `auto` detects them by the chat template.

        With `auto`, notations that the template does not show are those of `described`, and calls
        are JSON otherwise.
        """
        described = described or cls(None, None)
        return _output_format(chat_template, tool_call_parser, reasoning_parser, described)

    @property
    def marker_texts(self) -> frozenset[str]:
        """Texts that the parser must see, even if they are special tokens of the model."""
        calls = self.tool_calls.marker_texts if self.tool_calls else ()
        marks = self.reasoning.marker_texts if self.reasoning else ()
        return frozenset([*calls, *marks])


@functools.lru_cache(maxsize=64)
def _output_format(
    template: str,
    tool_call_parser: ToolCallParserName,
    reasoning_parser: ReasoningParserName,
    described: OutputFormat,
) -> OutputFormat:
    tool_calls = FORMATS.get(tool_call_parser)
    if tool_call_parser == "auto":
        tool_calls = tool_calls_of(template) or described.tool_calls or JSON
    elif tool_calls is not None and tool_calls is not HERMES:
        tool_calls = spelled_in(template, tool_calls)
    reasoning = REASONING_MARKS.get(reasoning_parser)
    if reasoning_parser == "auto":
        reasoning = reasoning_of(template) or described.reasoning
    return OutputFormat(tool_calls, reasoning)


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Options of the parser of an answer.

    - `tools`: parameter schemas by tool name; without tools no calls are parsed.
    - `barred`: names of tools that the model knows and may not call; such calls are content.
    - `max_calls`: further calls are dropped; None for all.
    - `starts_in_reasoning`: the prompt ends within reasoning (`ReasoningMarks.state_after`).
    - `hidden`: texts of special tokens that are in the text only because the parser needs some of
      them (`OutputFormat.marker_texts`). They are dropped from content.
    - `new_id`: makes the ids of calls; None for ids in the form of the notation, of characters that
      `draw` chooses.
    """

    tools: ToolSchemas = field(default_factory=dict)
    barred: frozenset[str] = frozenset()
    max_calls: int | None = None
    starts_in_reasoning: bool = False
    hidden: frozenset[str] = frozenset()
    new_id: Callable[[], str] | None = None
    draw: Draw = secrets.choice


class OutputParser:
    """Splits an answer into parts, independent of the cuts between pieces of its text.

    - A call is written as it is read, once its name is certain and its arguments begin. Where it is
      malformed, it ends and text follows as content; at the end of the answer it is cut.
    - Text that looks like a call and never becomes one is content, with its markers. Nothing
      raises.
    - White space around calls, and right after a marker of reasoning, is dropped.

    `num_reasoning_chars`: length of the reasoning at the beginning, with its marks; None until it
    has ended. Memory is bounded by the part of a call that is not written yet; time is linear.
    """

    def __init__(self, output_format: OutputFormat, options: ParserOptions) -> None:
        tool_calls = output_format.tool_calls if options.tools else None
        draws = functools.partial(tool_calls.new_id, options.draw) if tool_calls else str
        new_id = options.new_id or draws
        self._reader = Reader()
        self._format = tool_calls
        self._reasoning = output_format.reasoning
        self.num_reasoning_chars: int | None = None if self._reasoning else 0
        self._starts_in_reasoning = options.starts_in_reasoning
        self._is_end_missing = False  # a call ended the reasoning
        self._hidden = options.hidden
        self._writer = AnswerWriter(
            new_id, max_calls=options.max_calls, hidden=stops_of(options.hidden)
        )
        self._calls = CallReader(
            self._reader,
            self._writer,
            options.tools,
            options.barred,
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
        if self._format is HARMONY or (self._reasoning is HARMONY_THINK and not self._format):
            yield from self._channels().read()
            self._end_reasoning()
            return
        closer = yield from self._read_reasoning(is_first=True)
        if self._format is not None and self._format.may_be_bare:
            yield from self._attempt(self._format, "")
        openers = self._format.openers if self._format else ()
        stops = stops_of(self._hidden.union(openers, (closer,) if closer else ()))
        while (stop := (yield from self._reader.until(stops, self._writer.content))) is not None:
            if self._format is not None and stop in openers:
                yield from self._attempt(self._format, stop)
                yield from self._read_reasoning(is_first=False)

    def _attempt(self, tool_call_format: ToolCallFormat, opener: str) -> Reading[None]:
        """Reads calls after `opener`; writes text that is no call as content."""
        with self._reader.recording(self._calls.unwritten.append):
            try:
                yield from tool_call_format.read(self._calls, opener)
                is_call = True
            except NotAsExpected:
                is_call = False
        rest = "" if is_call else self._calls.cut()
        if rest:
            self._writer.not_a_call(rest)
        self._calls.unwritten.clear()

    # -- reasoning ---------------------------------------------------------------------------------

    def _read_reasoning(self, *, is_first: bool) -> Reading[str | None]:
        """Reads reasoning if it comes next.

        Returns the end of the text around the content after it, if the content is wrapped.
        """
        marks = self._reasoning
        if marks is None:
            return None
        begin: list[str] = []
        with self._reader.recording(begin.append):
            yield from self._reader.skip_space()
        late = marks.closers if self._is_end_missing else ()
        opened = yield from self._reader.one_of((*marks.openers, *late))
        if opened in late:
            self._is_end_missing = False
            yield from self._reader.skip_space()
            return None
        if opened is None and not (is_first and self._starts_in_reasoning):
            closer = (yield from self._begin_wrapped(marks)) if is_first else None
            if begin and closer is None:
                self._writer.content("".join(begin))
            if is_first:
                self.num_reasoning_chars = 0
            return closer
        yield from self._reader.skip_space()
        ends = self._format.openers if self._format and self._format.ends_reasoning else ()
        stops = stops_of(self._hidden.union(marks.closers, ends))
        while (stop := (yield from self._reader.until(stops, self._reason))) is not None:
            if stop in ends:
                self._is_end_missing = True
                self._reader.skip(-len(stop))
                self._end_reasoning()
                return None
            if stop in marks.closers:
                break
        self._end_reasoning()
        yield from self._reader.skip_space()
        return (yield from self._begin_wrapped(marks)) if is_first else None

    def _begin_wrapped(self, marks: ReasoningMarks) -> Reading[str | None]:
        opened = yield from self._reader.one_of([opener for opener, _ in marks.wrappers])
        if opened is None:
            return None
        yield from self._reader.skip_space()
        return dict(marks.wrappers)[opened]

    def _end_reasoning(self) -> None:
        if self.num_reasoning_chars is None:
            self.num_reasoning_chars = self._reader.num_read

    def _reason(self, text: str) -> None:
        self._writer.deltas.append(ReasoningDelta(text))

    def _channels(self) -> ChannelReader:
        return ChannelReader(
            self._reader,
            self._calls if self._format is HARMONY else None,
            self._writer.content,
            self._writer.not_a_call,
            self._reason if self._reasoning is HARMONY_THINK else self._writer.content,
            self._end_reasoning,
            self._hidden,
        )
