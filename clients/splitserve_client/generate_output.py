"""How `splitserve generate` writes a completion: text, one JSON object, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from splitserve_client.completion import End, Piece
from splitserve_client.types import TokenLogprob


class Output(Protocol):
    """Gets the pieces in order, then the end."""

    def piece(self, piece: Piece) -> None:
        """New text and tokens."""

    def end(self, end: End) -> None:
        """The completion is whole."""


class TextOutput:
    """The text as it comes, and a newline."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def piece(self, piece: Piece) -> None:
        """Writes the text."""
        if piece.text:
            self._file.write(piece.text)
            self._file.flush()

    def end(self, end: End) -> None:
        """Ends the line."""
        self._file.write("\n")
        self._file.flush()


class JsonOutput:
    """One object, at the end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []

    def piece(self, piece: Piece) -> None:
        """Collects."""
        self._texts.append(piece.text)
        self._token_ids.extend(piece.token_ids)
        self._logprobs.extend(piece.logprobs)
        self._prompt_logprobs.extend(piece.prompt_logprobs)

    def end(self, end: End) -> None:
        """Writes all of it."""
        content = {
            "text": "".join(self._texts),
            "token_ids": self._token_ids,
            **_scores(self._logprobs, self._prompt_logprobs),
            **_finish(end),
        }
        _write_line(self._file, content)


class JsonLinesOutput:
    """A line for each piece, and one for the end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def piece(self, piece: Piece) -> None:
        """Writes a line."""
        content = {
            "text": piece.text,
            "token_ids": piece.token_ids,
            **_scores(piece.logprobs, piece.prompt_logprobs),
        }
        _write_line(self._file, content)

    def end(self, end: End) -> None:
        """Writes the last line."""
        _write_line(self._file, _finish(end))


def _write_line(file: TextIO, content: dict[str, Any]) -> None:
    file.write(json.dumps(content) + "\n")
    file.flush()


def _finish(end: End) -> dict[str, Any]:
    content: dict[str, Any] = {"finish_reason": end.reason.value, "usage": asdict(end.usage)}
    if end.stop_string is not None:
        content["stop_string"] = end.stop_string
    return content


def _scores(
    logprobs: Sequence[TokenLogprob], prompt_logprobs: Sequence[TokenLogprob]
) -> dict[str, Any]:
    content = {}
    if logprobs:
        content["logprobs"] = [asdict(score) for score in logprobs]
    if prompt_logprobs:
        content["prompt_logprobs"] = [asdict(score) for score in prompt_logprobs]
    return content
