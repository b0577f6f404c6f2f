"""Text from a stream of tokens: the pieces add up to the text of all tokens at once.

What may still change is held back: the bytes of an incomplete character; and where a tokenizer
joins runs of byte tokens, the whole run, since one wrong byte makes replacement characters of all.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Protocol, Self

from splitserve_client.token_texts import ElementMaps, TokenTexts

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character of UTF-8 has at most 4 bytes, so 3 say which one is incomplete.
_MAX_INCOMPLETE_BYTES = 3
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Turns tokens into text; for one stream."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` bring; never ends within a character."""

    def finish(self) -> str:
        """What was held back; nothing more comes."""

    def fork(self) -> Self:
        """Another that goes on from here by itself; costs nothing for what was pushed so far."""


def make_detokenizer(
    texts: TokenTexts, decode: Callable[[Sequence[int]], str], context: Sequence[int]
) -> Detokenizer:
    """For tokens that continue `context`, whose text is not returned. `decode`: the whole text."""
    if texts.kind is None:
        return WholeDetokenizer(decode, context)
    if texts.kind.is_byte_level:
        return BytesDetokenizer(texts, context)
    return ElementsDetokenizer(texts, context)


class BytesDetokenizer:
    """Of byte-level tokens: bytes are joined and read as UTF-8, whatever token they come from."""

    def __init__(self, texts: TokenTexts, context: Sequence[int] = ()) -> None:
        self._bytes_of = texts.byte_strings.__getitem__
        self._decoder = _new_decoder("replace")
        self._decode = self._decoder.decode
        tail = b""
        for token_id in reversed(context):
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= _MAX_INCOMPLETE_BYTES:
                break
        self._decode(tail[-_MAX_INCOMPLETE_BYTES:])
        self._has_output = not context

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` bring."""
        self._has_output = True
        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        """An incomplete character, as a replacement character."""
        return self._decode(b"", True) if self._has_output else ""

    def fork(self) -> Self:
        """Another that goes on from here."""
        other = copy(self)
        other._decoder = copy(self._decoder)
        other._decode = other._decoder.decode
        return other


class ElementsDetokenizer:
    """Of tokens that are texts of their own, with runs of byte tokens among them."""

    def __init__(self, texts: TokenTexts, context: Sequence[int] = ()) -> None:
        assert texts.kind is not None, "it can be streamed"
        self._texts = texts
        self._after = texts.kind.after
        self._later = texts.later.__getitem__
        self._stripped = texts.kind.stripped
        self._num_to_strip = texts.kind.num_stripped
        self._run: _Run | None = None
        self._is_first = True
        # Nothing that came before can change what the next token contributes.
        self._is_plain = False
        self._has_output = not context
        self._follow(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` bring."""
        self._has_output = True
        if self._is_plain:
            # The usual case. What is no text, a byte or nothing, is not joined.
            with suppress(TypeError):
                return "".join(map(self._later, token_ids))  # type: ignore[arg-type]
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """What was held back: a run of bytes."""
        return self._end_run() if self._has_output else ""

    def fork(self) -> Self:
        """Another that goes on from here."""
        other = copy(self)
        other._run = None if self._run is None else self._run.fork()
        return other

    def _push_one(self, token_id: int) -> str:
        if self._is_first:
            value = self._texts.contribution(token_id, is_first=True)
        else:
            value = self._later(token_id)
        if value is None:
            return ""
        is_first, self._is_first = self._is_first, False
        if isinstance(value, int):
            self._is_plain = False
            self._run = self._run or _Run(self._after, is_first=is_first)
            return self._strip(self._run.push(value))
        piece = self._end_run() + self._strip(value)
        self._is_plain = not self._num_to_strip
        return piece

    def _end_run(self) -> str:
        run, self._run = self._run, None
        return "" if run is None else self._strip(run.end())

    def _strip(self, piece: str) -> str:
        """Without what is cut off at the beginning of the whole text."""
        while piece and self._num_to_strip:
            if not piece.startswith(self._stripped):
                self._num_to_strip = 0
                break
            piece = piece[1:]
            self._num_to_strip -= 1
        return piece

    def _follow(self, context: Sequence[int]) -> None:
        """Takes note of `context`: of its beginning, and of a run of bytes at its end."""
        num_read = 0
        while num_read < len(context) and not self._is_plain:
            self._push_one(context[num_read])
            num_read += 1
        start = len(context)
        while start > num_read and not isinstance(self._later(context[start - 1]), str):
            start -= 1
        for token_id in context[start:]:
            self._push_one(token_id)
        if self._run is not None:
            self._strip(self._run.take_characters())


class _Run:
    """A run of byte tokens: text if all of it is UTF-8, otherwise a replacement for each byte."""

    def __init__(self, after: ElementMaps, *, is_first: bool) -> None:
        self._after = after
        self._is_first = is_first
        self._bytes = bytearray()
        self._checker = _new_decoder("strict")
        self._is_broken = False
        self._num_shown = 0

    def push(self, byte: int) -> str:
        """Takes a byte; returns what can be shown already, which is only what is broken."""
        self._bytes.append(byte)
        if not self._is_broken:
            try:
                self._checker.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._is_broken = True
        return self._show_replacements() if self._is_broken else ""

    def end(self) -> str:
        """The rest of it."""
        try:
            text = "" if self._is_broken else self._bytes[self._num_shown :].decode()
        except UnicodeDecodeError:  # its last character is incomplete
            self._is_broken = True
        return self._show_replacements() if self._is_broken else self._apply(text)

    def take_characters(self) -> str:
        """What it is so far without an incomplete character, which then is not returned again."""
        if self._is_broken:
            return ""
        num_incomplete = len(self._checker.getstate()[0])
        text = self._bytes[: len(self._bytes) - num_incomplete].decode()
        self._num_shown = len(self._bytes) - num_incomplete
        return self._apply(text) if text else ""

    def fork(self) -> Self:
        """Another that goes on from here; copies what is not ended yet."""
        other = copy(self)
        other._bytes = bytearray(self._bytes)
        other._checker = copy(self._checker)
        return other

    def _show_replacements(self) -> str:
        num_new = len(self._bytes) - self._num_shown
        pieces = [self._apply(_REPLACEMENT) for _ in range(num_new)]
        self._num_shown += num_new
        return "".join(pieces)

    def _apply(self, text: str) -> str:
        is_first, self._is_first = self._is_first, False
        return self._after.apply(text, is_first=is_first)


class WholeDetokenizer:
    """Of decoders whose text is only known when all tokens are: all of it comes at the end."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = context
        self._num_context_chars = len(decode(context)) if context else 0
        self._token_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Nothing yet."""
        self._token_ids.extend(token_ids)
        return ""

    def finish(self) -> str:
        """All of it."""
        token_ids = [*self._context, *self._token_ids]
        return self._decode(token_ids)[self._num_context_chars :] if token_ids else ""

    def fork(self) -> Self:
        """Another that goes on from here."""
        other = copy(self)
        other._token_ids = list(self._token_ids)
        return other
