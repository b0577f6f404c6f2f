"""How `splitserve generate` writes completions: text, one JSON object, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from splitserve_cli.terminal import TextFile
from splitserve_client.text_generation import GrowingText
from splitserve_client.text_stream import End, Piece
from splitserve_client.types import FinishReason, SequenceFinish, TokenLogprob


class Output(Protocol):
    """Gets the pieces in order, then the end."""

    def piece(self, piece: Piece) -> None:
        """New text and tokens."""

    def end(self, end: End) -> None:
        """All is there."""


class TextOutput:
    """The text as it comes, and a newline."""

    def __init__(self, file: TextFile) -> None:
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


class SeveralTextsOutput:
    """One text after the other, each under a heading; the first that is not whole as it comes."""

    def __init__(self, file: TextFile, num_completions: int) -> None:
        self._file = file
        self._texts = [""] * num_completions
        self._is_whole = [False] * num_completions
        self._shown = -1

    def piece(self, piece: Piece) -> None:
        """Writes the text if it is its turn, keeps it otherwise."""
        if self._shown < 0:
            self._show(0)
        if piece.index == self._shown:
            self._file.write(piece.text)
        else:
            self._texts[piece.index] += piece.text
        self._is_whole[piece.index] |= piece.finish is not None
        while self._is_whole[self._shown] and self._shown + 1 < len(self._texts):
            self._show(self._shown + 1)
        self._file.flush()

    def end(self, end: End) -> None:
        """Writes what was kept, and ends the line."""
        while self._shown + 1 < len(self._texts):
            self._show(self._shown + 1)
        self._file.write("\n")
        self._file.flush()

    def _show(self, index: int) -> None:
        gap = "\n\n" if index else ""
        heading = f"--- {index + 1} of {len(self._texts)} ---"
        self._file.write(f"{gap}{heading}\n{self._texts[index]}")
        self._shown = index


class JsonOutput:
    """One object, at the end. Of several completions it has a list, by index."""

    def __init__(self, file: TextIO, num_completions: int = 1) -> None:
        self._file = file
        self._completions = [GrowingText() for _ in range(num_completions)]
        self._prompt_logprobs: list[TokenLogprob] = []

    def piece(self, piece: Piece) -> None:
        """Collects."""
        self._completions[piece.index].add(piece)
        self._prompt_logprobs.extend(piece.prompt_logprobs)

    def end(self, end: End) -> None:
        """Writes all of it."""
        if len(self._completions) == 1:
            content = _content(self._completions[0])
        else:
            content = {
                "completions": [
                    {"index": index, **_content(completion), **_ending(completion)}
                    for index, completion in enumerate(self._completions)
                ]
            }
        scores = _scores((), self._prompt_logprobs)
        _write_line(self._file, {**content, **scores, **_finish(end)})


def _content(text: GrowingText) -> dict[str, Any]:
    return {
        "text": "".join(text.texts),
        "token_ids": text.token_ids,
        **_scores(text.logprobs, ()),
        **_ranking(text.finish),
    }


def _ending(text: GrowingText) -> dict[str, Any]:
    assert text.finish is not None, "every completion ends before its request does"
    return _reason(text.finish.reason, text.stop_string)


class JsonLinesOutput:
    """A line for each piece, and one for the end. Of several completions each has its index."""

    def __init__(self, file: TextIO, num_completions: int = 1) -> None:
        self._file = file
        self._num_completions = num_completions

    def piece(self, piece: Piece) -> None:
        """Writes a line."""
        content: dict[str, Any] = {"index": piece.index} if self._num_completions > 1 else {}
        content["text"] = piece.text
        content["token_ids"] = piece.token_ids
        content |= _scores(piece.logprobs, piece.prompt_logprobs)
        if piece.finish is not None:
            content |= _ranking(piece.finish)
            content |= _reason(piece.finish.reason, piece.stop_string)
        _write_line(self._file, content)

    def end(self, end: End) -> None:
        """Writes the last line."""
        _write_line(self._file, _finish(end))


def _write_line(file: TextIO, content: dict[str, Any]) -> None:
    file.write(json.dumps(content) + "\n")
    file.flush()


def _finish(end: End) -> dict[str, Any]:
    return {**_reason(end.reason, end.stop_string), "usage": asdict(end.usage)}


def _reason(reason: FinishReason, stop_string: str | None) -> dict[str, Any]:
    content = {"finish_reason": reason.value}
    return content if stop_string is None else {**content, "stop_string": stop_string}


def _ranking(finish: SequenceFinish | None) -> dict[str, Any]:
    """What made it one of the best, if it had to be."""
    if finish is None:
        return {}
    ranking = {"cumulative_logprob": finish.cumulative_logprob, "score": finish.score}
    return {name: value for name, value in ranking.items() if value is not None}


def _scores(
    logprobs: Sequence[TokenLogprob], prompt_logprobs: Sequence[TokenLogprob]
) -> dict[str, Any]:
    content = {}
    if logprobs:
        content["logprobs"] = [asdict(score) for score in logprobs]
    if prompt_logprobs:
        content["prompt_logprobs"] = [asdict(score) for score in prompt_logprobs]
    return content
