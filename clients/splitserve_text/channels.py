"""Answers in OpenAI's Harmony format: messages with headers, of gpt-oss.

A header names the channel of its message (reasoning is `analysis`), and the tool if the message is
a call: `<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>`, or
` to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>` after `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from splitserve_text.answer_reader import NotAsExpected, Reader, Reading, stops_of
from splitserve_text.tool_calls import CallReader

_MAX_HEADER_CHARS = 1024
_BEGINNINGS = frozenset(("<|start|>", "<|channel|>"))
_IN_HEADERS = frozenset(("<|constrain|>", "<|message|>"))
_ENDS = _BEGINNINGS | {"<|end|>", "<|call|>", "<|return|>"}
# The prompt ends within a header, after `<|start|>assistant`.
_CONTINUED = (" to=", "to=")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class ChannelReader:
    """Reads the messages of an answer. `calls`: None to leave calls in the content.

    `content`, `reason`: write pieces of content and of reasoning. `hidden`: texts to drop.
    `end_reasoning`: is called after each header that begins something other than reasoning.
    """

    reader: Reader
    calls: CallReader | None
    content: Callable[[str], None]
    not_a_call: Callable[[str], None]
    reason: Callable[[str], None]
    end_reasoning: Callable[[], None]
    hidden: frozenset[str]

    def read(self) -> Reading[None]:
        """Reads the whole answer. Text outside of messages is content."""
        stops = stops_of(self.hidden | _ENDS)
        continued = yield from self.reader.one_of(_CONTINUED)
        if continued is not None:
            stop = yield from self._read_message(continued)
        else:
            stop = yield from self.reader.until(stops, self._outside)
        while stop is not None:
            if stop in _BEGINNINGS:
                stop = yield from self._read_message(stop)
            if stop not in _BEGINNINGS:
                stop = yield from self.reader.until(stops, self._outside)

    def _outside(self, text: str) -> None:
        self.end_reasoning()
        self.content(text)

    def _read_message(self, beginning: str) -> Reading[str | None]:
        """Reads a header and the message after it; returns the text that ended the message."""
        pieces = [beginning]
        with self.reader.recording(pieces.append):
            stop = yield from self._read_header(beginning)
        header = "".join(pieces)
        if stop != "<|message|>":
            self.not_a_call(header.removesuffix(stop or ""))
            return stop
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if channel is not None and channel[1] == "analysis" and recipient is None:
            write = self.reason
        else:
            self.end_reasoning()
            write = self.content
        if recipient is not None and self.calls is not None:
            yield from self._read_call(self.calls, header, recipient[1])
        stop = ""
        while stop is not None and stop not in _ENDS:
            stop = yield from self.reader.until(stops_of(self.hidden | _ENDS), write)
        return stop

    def _read_header(self, beginning: str) -> Reading[str | None]:
        """Reads a header; returns the text that ended it, "" if it is too long."""
        stops = stops_of(self.hidden | _ENDS | _IN_HEADERS)
        has_channel = beginning == "<|channel|>"
        num_chars = 0

        def count(text: str) -> None:
            nonlocal num_chars
            num_chars += len(text)
            if num_chars > _MAX_HEADER_CHARS:
                raise NotAsExpected

        while True:
            try:
                stop = yield from self.reader.until(stops, count)
            except NotAsExpected:
                return ""
            if stop == "<|channel|>" and not has_channel:
                has_channel = True
            elif stop is None or stop == "<|message|>" or stop in _ENDS:
                return stop

    def _read_call(self, calls: CallReader, header: str, recipient: str) -> Reading[None]:
        """Reads the arguments of a call; leaves what follows them, or all text if it is no call."""
        calls.begin(header, "", is_marked=True)
        rest = ""
        with self.reader.recording(calls.unwritten.append):
            try:
                yield from self.reader.skip_space()
                yield from calls.read_arguments(recipient.removeprefix("functions."))
                yield from self.reader.skip_space()
                calls.end()
            except NotAsExpected:
                self.reader.flush()
                rest = calls.cut()
        if rest:
            self.not_a_call(rest)
        calls.unwritten.clear()
