"""Recorded traces, read line by line: lengths, times and shared prefixes.

- Azure's public traces of LLM inference (2023, 2024): CSV with TIMESTAMP, ContextTokens and
  GeneratedTokens. Their prompts are unknown, so no prompts share a prefix.
- Mooncake's: JSON lines with timestamp (ms), input_length, output_length and hash_ids, one id for
  each 512 tokens of the prompt. Prompts whose first ids are equal have an equal prefix.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

from splitserve_bench.workloads.conversation import Conversation, PromptPiece, Turn
from splitserve_common import parse_json

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 2**31 - 1
_GZIP_MAGIC = b"\x1f\x8b"
# Ample: a prompt of a million tokens has 16 kB of hashes.
_MOST_LINE_CHARS = 2**20
# Arrival time in seconds since an arbitrary time, and the request.
_Request = tuple[float, Turn]


class TraceUnreadable(ValueError):
    """Trace in an unknown or broken format; the message names file and line."""


def read_trace(path: Path) -> Iterator[Conversation]:
    """Yields the requests of a trace in order, the first at 0 s. The first line shows the format.

    Raises OSError and TraceUnreadable, the latter possibly after some requests.
    """
    with _open(path) as file:
        lines = _lines(path, file)
        first = next(lines, None)
        if first is None:
            raise _empty(path)
        read = _reader_of(path, first)
        first_s, latest_s = None, 0.0
        for at_s, turn in read(path, chain([first], lines)):
            first_s = at_s if first_s is None else first_s
            # A time earlier than the previous one means at once.
            latest_s = max(latest_s, at_s - first_s)
            yield Conversation(latest_s, (turn,))
        if first_s is None:
            raise _empty(path)


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """Opens a trace as text, decompressed if it is gzip. Skips a byte order mark.

    Opens the file only once, since a pipe cannot be read again.
    """
    with path.open("rb") as file:
        is_packed = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
        content = gzip.GzipFile(fileobj=file) if is_packed else file
        with io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
            yield text


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    for number in count(1):
        try:
            line = file.readline(_MOST_LINE_CHARS)
        except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceUnreadable(
                f"{path}:{number}: {error}; allowed: UTF-8 text, plain or gzip"
            ) from error
        if not line:
            return
        if len(line) == _MOST_LINE_CHARS:
            raise TraceUnreadable(
                f"{path}:{number}: line too long; allowed: {_MOST_LINE_CHARS - 1} characters"
            )
        yield line


def _reader_of(path: Path, first: str) -> Callable[[Path, Iterable[str]], Iterator[_Request]]:
    if first.lstrip().startswith("{"):
        return _read_mooncake
    with suppress(csv.Error):
        if set(_AZURE_COLUMNS) <= set(next(csv.reader([first], skipinitialspace=True))):
            return _read_azure
    raise TraceUnreadable(
        f"{path}:1: unknown format; allowed: CSV with {','.join(_AZURE_COLUMNS)} (Azure), or JSON"
        " lines with timestamp, input_length, output_length and hash_ids (Mooncake)"
    )


def _read_azure(path: Path, lines: Iterable[str]) -> Iterator[_Request]:
    for number, (where, row) in enumerate(_azure_rows(path, lines)):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
        except (TypeError, ValueError) as error:
            raise _unreadable(where, "TIMESTAMP", row.get("TIMESTAMP"), "a time") from error
        # Traces of 2023 have no time zone, and only differences matter.
        at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        num_prompt, num_output = (_count(where, row, name) for name in _AZURE_COLUMNS[1:])
        yield at_s, Turn((PromptPiece(-1 - number, num_prompt),), num_output)


def _azure_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each row with its position (file and line). Raises TraceUnreadable."""
    reader = csv.DictReader(lines, skipinitialspace=True)
    try:
        for row in reader:
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise TraceUnreadable(f"{path}:{reader.line_num}: {error}") from error


def _read_mooncake(path: Path, lines: Iterable[str]) -> Iterator[_Request]:
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        where = f"{path}:{number + 1}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise TraceUnreadable(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceUnreadable(
                f"{where}: the line is of type {type(row).__name__}; allowed: an object"
            )
        timestamp = row.get("timestamp")
        if not isinstance(timestamp, int | float) or not math.isfinite(timestamp):
            raise _unreadable(where, "timestamp", timestamp, "milliseconds")
        pieces = _pieces(where, row, _count(where, row, "input_length"), -1 - number)
        yield timestamp / 1000, Turn(pieces, _count(where, row, "output_length"))


def _pieces(
    where: str, row: Mapping[str, Any], num_tokens: int, own_key: int
) -> tuple[PromptPiece, ...]:
    """Returns one piece per hash, and a piece of its own for tokens that no hash covers."""
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(key, int) and key >= 0 for key in hashes):
        raise _unreadable(where, "hash_ids", hashes, "a list of integers from 0")
    pieces = []
    for key in hashes[: -(-num_tokens // MOONCAKE_BLOCK_TOKENS)]:
        pieces.append(PromptPiece(key, min(MOONCAKE_BLOCK_TOKENS, num_tokens)))
        num_tokens -= pieces[-1].num_tokens
    return (*pieces, PromptPiece(own_key, num_tokens)) if num_tokens else tuple(pieces)


def _count(where: str, row: Mapping[str, Any], name: str) -> int:
    """Returns a number of tokens, at least 1, also where the trace has 0.

    Raises TraceUnreadable.
    """
    value = row.get(name)
    try:
        count = int(value)  # type: ignore[arg-type]  # errors are caught below
    except (TypeError, ValueError, OverflowError) as error:
        raise _unreadable(where, name, value, "a number of tokens") from error
    if not 0 <= count <= _MOST_TOKENS:
        raise _unreadable(where, name, value, f"0 to {_MOST_TOKENS}")
    return max(count, 1)


def _empty(path: Path) -> TraceUnreadable:
    return TraceUnreadable(f"{path}: no requests; allowed: a trace with requests")


def _unreadable(where: str, name: str, value: object, allowed: str) -> TraceUnreadable:
    return TraceUnreadable(f"{where}: {name} is {str(value)[:80]!r}; allowed: {allowed}")
