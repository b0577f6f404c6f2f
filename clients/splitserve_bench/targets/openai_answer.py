"""What the events of a streamed answer say: how much came, and what it all was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitserve_bench.targets.event_lines import EventLines
from splitserve_bench.targets.target import Answered, AskFailed
from splitserve_rpc.json_text import parse_json

_MOST_TOKENS = 2**31 - 1
# Where an event's text may be, of completions and of chats.
_TEXTS = ("content", "reasoning_content", "reasoning", "text")


class AnswerReader:
    """Reads events of a completion or a chat with one choice. `text`: all of it so far."""

    def __init__(self) -> None:
        self._lines = EventLines()
        self._texts: list[str] = []
        self._num_counted = 0
        self._answered: Answered | None = None
        self._is_over = False

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(self._texts)

    def feed(self, data: bytes) -> tuple[bool, int | None]:
        """Whether tokens came with these bytes, and how many if the server counts them.

        Raises AskFailed.
        """
        came, before = False, self._num_counted
        for line in self._lines.feed(data):
            if line == b"[DONE]":
                self._is_over = True
            else:
                came |= self._read(line)
        return came, (self._num_counted - before) or None

    def finish(self) -> Answered:
        """The counts, when nothing more comes. Raises AskFailed if that was not the end."""
        if not self._is_over:
            raise AskFailed("stream_cut", "the answer has no end")
        return self._answered or Answered()

    def _read(self, line: bytes) -> bool:
        try:
            event = parse_json(line)
        except ValueError as error:
            raise AskFailed("bad_answer", "an event is not JSON") from error
        if not isinstance(event, dict):
            raise AskFailed("bad_answer", "an event is no object")
        if event.get("error"):
            raise AskFailed("failed_in_stream", error_message(event))
        choices = _objects(event.get("choices") or [])
        self._read_usage(event.get("usage"), is_running=bool(choices))
        came = False
        for choice in choices:
            # The last of a stream that says no [DONE].
            self._is_over |= choice.get("finish_reason") is not None
            (source,) = _objects([choice.get("delta") or choice])
            texts = [source[name] for name in _TEXTS if isinstance(source.get(name), str)]
            self._texts += texts
            came |= any(texts) or bool(source.get("tool_calls"))
        return came

    def _read_usage(self, usage: object, is_running: bool) -> None:
        """`is_running`: it is that of the tokens so far, and not what ends the stream."""
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        num_output_tokens = _count(usage.get("completion_tokens"))
        if is_running:
            self._num_counted = max(num_output_tokens or 0, self._num_counted)
        self._answered = Answered(
            _count(usage.get("prompt_tokens")), num_output_tokens, _count(cached)
        )


def _objects(values: object) -> list[dict[str, Any]]:
    """Raises AskFailed if they are no list of objects."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise AskFailed("bad_answer", "an event has choices that are no objects")
    return values


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else None


def error_message(body: object) -> str:
    """What an error's body says."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message: Any = error.get("message") if isinstance(error, Mapping) else None
    return str(message or error)
