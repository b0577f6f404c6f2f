"""Where the reader of a tool call format puts what it found."""

from __future__ import annotations

from collections.abc import Callable

from splitserve_gateway.parsing.deltas import (
    ContentDelta,
    Delta,
    ToolCallArguments,
    ToolCallStart,
)
from splitserve_gateway.parsing.reader import Stops


class AnswerWriter:
    """Makes deltas of content and calls.

    White space before the first call, between calls and after the last is no content, if there is
    nothing else. Of more than `max_calls` calls the first are written, the others dropped.
    """

    def __init__(self, new_id: Callable[[], str], *, max_calls: int | None, hidden: Stops) -> None:
        """`hidden`: texts that are never written as content."""
        self.deltas: list[Delta] = []
        self._new_id = new_id
        self._max_calls = max_calls
        self._hidden = hidden
        self._num_calls = 0
        self._held_space: list[str] | None = []  # None: content has begun

    def content(self, text: str) -> None:
        """More of the answer."""
        if self._held_space is not None:
            self._held_space.append(text)
            if text.isspace():
                return
            text, self._held_space = "".join(self._held_space), None
        if text:
            self.deltas.append(ContentDelta(text))

    def not_a_call(self, text: str) -> None:
        """What looked like a call and is none: content, without what is hidden."""
        visible = self._hidden.pattern.sub("", text) if self._hidden.texts else text
        if visible:
            self.content(visible)

    def start_call(self, name: str) -> None:
        """A call begins."""
        self._held_space = []
        self._num_calls += 1
        if not self._is_dropping():
            self.deltas.append(ToolCallStart(self._num_calls - 1, self._new_id(), name))

    def call_arguments(self, text: str) -> None:
        """More arguments of the call that has begun."""
        if not self._is_dropping():
            self.deltas.append(ToolCallArguments(self._num_calls - 1, text))

    def finish(self) -> None:
        """There is nothing more."""
        if self._held_space and not self._num_calls:
            self.deltas.append(ContentDelta("".join(self._held_space)))

    def take(self) -> list[Delta]:
        """The deltas since the last time."""
        taken, self.deltas = self.deltas, []
        return taken

    def _is_dropping(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls
