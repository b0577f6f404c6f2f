"""Parser of one answer: splits the text into reasoning, content and tool calls as it arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve_gateway.parsing.calls import CallReader, ToolSchemas
from splitserve_gateway.parsing.formats import OutputFormat, ReasoningMarks, ToolCallFormat
from splitserve_gateway.parsing.reader import (
    AnswerWriter,
    Delta,
    NotAsExpected,
    Reader,
    Reading,
    ReasoningDelta,
    stops_of,
)


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
