"""Incremental reader of text, the writer of parsed answers, and the deltas it writes.

Parsers are generators that yield wherever they need more text. So a format is written as for a
whole text, and the cuts between pieces make no difference. Each character is examined a bounded
number of times: text that was read is not read again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]

_SPACE = re.compile(r"[ \t\r\n]*")


class NotAsExpected(Exception):
    """Text does not match the format."""


class Reader:
    """Unread text, and recorders of the text that is read."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._num_dropped = 0  # characters before `_text`
        self._has_ended = False
        self.has_met_end = False  # more text was needed than there is
        self._recorders: list[Callable[[str], None]] = []
        self._recorded: list[int] = []  # position up to which each recorder has the text

    def feed(self, text: str) -> None:
        """Appends text."""
        self.flush()
        self._num_dropped += self._position
        self._text = self._text[self._position :] + text
        self._position = 0
        self._recorded = [0] * len(self._recorded)

    def end(self) -> None:
        """Marks the end of the text."""
        self._has_ended = True

    @property
    def num_read(self) -> int:
        """Number of characters read so far."""
        return self._num_dropped + self._position

    @property
    def is_at_end(self) -> bool:
        """Whether all text received so far was read."""
        return self._position == len(self._text)

    def flush(self) -> None:
        """Passes the text read so far to the recorders."""
        for index, record in enumerate(self._recorders):
            piece = self._text[self._recorded[index] : self._position]
            self._recorded[index] = self._position
            if piece:
                record(piece)

    @contextmanager
    def recording(self, record: Callable[[str], None]) -> Iterator[None]:
        """Passes the text read within the `with` to `record`, in pieces."""
        self.flush()
        self._recorders.append(record)
        self._recorded.append(self._position)
        try:
            yield
        finally:
            self.flush()
            self._recorders.pop()
            self._recorded.pop()

    def peek(self, num_chars: int = 1) -> Reading[str]:
        """Returns the next characters without reading them; fewer at the end of the text."""
        while len(self._text) - self._position < num_chars and not self._has_ended:
            yield
        self.has_met_end |= len(self._text) - self._position < num_chars
        return self._text[self._position : self._position + num_chars]

    def skip(self, num_chars: int) -> None:
        """Reads characters that `peek` returned; a negative number makes read ones unread."""
        self._position += num_chars

    def take(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads and returns the longest match of `pattern`, a repetition of one character class."""
        pieces: list[str] = []
        while True:
            match = pattern.match(self._text, self._position)
            if match is not None:
                pieces.append(match.group())
                self._position = match.end()
            if self._position < len(self._text) or self._has_ended:
                self.has_met_end |= self._position == len(self._text)
                return "".join(pieces)
            yield

    def skip_space(self) -> Reading[None]:
        """Reads white space."""
        yield from self.take(_SPACE)

    def one_of(self, texts: Sequence[str]) -> Reading[str | None]:
        """Reads the text of `texts` that comes next, and returns that text; None if none matches.

        No text of `texts` may be a prefix of another.
        """
        for text in texts:
            length = 1
            while (found := (yield from self.peek(length))) and text.startswith(found):
                if found == text:
                    self.skip(length)
                    return text
                if len(found) < length:
                    break
                length += 1
        return None

    def expect(self, text: str) -> Reading[None]:
        """Reads `text`. Raises NotAsExpected for different text."""
        if (yield from self.one_of((text,))) is None:
            raise NotAsExpected

    def until(
        self, stops: Stops, write: Callable[[str], None], *, leaves_beginning: bool = False
    ) -> Reading[str | None]:
        """Reads through the first of `stops` and returns the stop; None at the end of the text.

        Passes the text before the stop to `write` as soon as it cannot be the beginning of a stop.
        `leaves_beginning`: at the end of the text, leave the beginning of a stop unread.
        """
        while True:
            match = stops.pattern.search(self._text, self._position) if stops.texts else None
            end = len(self._text)
            if not self._has_ended or leaves_beginning:
                end -= stops.num_held_back(self._text, self._position)
            if match is not None and (match.start() < end or self._has_ended):
                end = match.start()
            else:  # what comes next may belong to an earlier or longer stop
                match = None
            if end > self._position:
                write(self._text[self._position : end])
            self._position = end
            if match is not None:
                self._position = match.end()
                return match.group()
            if self._has_ended:
                self.has_met_end = True
                return None
            yield

    def rest(self) -> str:
        """Reads and returns all text received so far."""
        rest = self._text[self._position :]
        self._position = len(self._text)
        return rest


@functools.lru_cache(maxsize=64)
def stops_of(texts: frozenset[str]) -> Stops:
    """Returns cached Stops for `texts`: a model may have a thousand special tokens."""
    return Stops(texts)


class Stops:
    """Set of texts to search for at once."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = tuple(sorted(set(texts), key=len, reverse=True))
        self.pattern = re.compile("|".join(re.escape(text) for text in self.texts))
        self._beginnings = {text[:length] for text in self.texts for length in range(1, len(text))}

    def num_held_back(self, text: str, start: int) -> int:
        """Returns how many of the last characters from `start` on may begin a stop."""
        longest = len(self.texts[0]) - 1 if self.texts else 0
        for length in range(min(longest, len(text) - start), 0, -1):
            if text[len(text) - length :] in self._beginnings:
                return length
        return 0


# -- Writer of parsed answers ----------------------------------------------------------------------


class AnswerWriter:
    """Collects deltas of content and tool calls.

    Drops white space before the first call, between calls and after the last call if no other
    content is there. Drops calls after the first `max_calls`.
    """

    def __init__(self, new_id: Callable[[], str], *, max_calls: int | None, hidden: Stops) -> None:
        """Starts an empty answer. `hidden`: texts that are never written as content."""
        self.deltas: list[Delta] = []
        self._new_id = new_id
        self._max_calls = max_calls
        self._hidden = hidden
        self._num_calls = 0
        self._ids: set[str] = set()
        self._held_space: list[str] | None = []  # None: content has begun

    def content(self, text: str) -> None:
        """Writes content."""
        if self._held_space is not None:
            self._held_space.append(text)
            if text.isspace():
                return
            text, self._held_space = "".join(self._held_space), None
        if text:
            self.deltas.append(ContentDelta(text))

    def not_a_call(self, text: str) -> None:
        """Writes text that looked like a call as content, without hidden texts."""
        visible = self._hidden.pattern.sub("", text) if self._hidden.texts else text
        if visible:
            self.content(visible)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Starts a call of the tool `name`. `call_id`: the model's own id, used if it is unique."""
        self._held_space = []
        self._num_calls += 1
        if not self._is_dropping():
            if call_id is None or call_id in self._ids:
                call_id = self._new_id()
            self._ids.add(call_id)
            self.deltas.append(ToolCallStart(self._num_calls - 1, call_id, name))

    def call_arguments(self, text: str) -> None:
        """Writes arguments of the started call."""
        if text and not self._is_dropping():
            self.deltas.append(ToolCallArguments(self._num_calls - 1, text))

    def finish(self) -> None:
        """Ends the answer; writes white space that was held back if there were no calls."""
        if self._held_space and not self._num_calls:
            self.deltas.append(ContentDelta("".join(self._held_space)))

    def take(self) -> list[Delta]:
        """Returns and removes the collected deltas."""
        taken, self.deltas = self.deltas, []
        return taken

    def _is_dropping(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls


# -- Deltas of parsed answers ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a tool call. `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Piece of a call's arguments. All pieces joined are a JSON object as the model wrote it."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments
