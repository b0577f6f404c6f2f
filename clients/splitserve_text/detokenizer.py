"""Incremental detokenization: the pieces of text add up to the text of all tokens decoded at once.

Text that may still change is held back: the bytes of an incomplete character and, where a tokenizer
joins runs of byte tokens, the whole run, since one invalid byte turns the run into replacement
characters.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Protocol, Self

from splitserve_text.token_texts import ElementMaps, TokenTexts

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character has at most 4 bytes, so 3 bytes tell whether it is incomplete.
_MAX_INCOMPLETE_BYTES = 3
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Turns the tokens of one stream into text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that `token_ids` add; it never ends within a character."""

    def finish(self) -> str:
        """Returns the text that was held back; no token may follow."""

    def fork(self) -> Self:
        """Copies the detokenizer.

        The copy continues independently and shares earlier state for free.
        """


def make_detokenizer(
    texts: TokenTexts, decode: Callable[[Sequence[int]], str], context: Sequence[int]
) -> Detokenizer:
    """Returns a detokenizer for tokens that follow `context`, whose text is not returned.

    `decode` gives the text of all tokens at once.
    """
    if texts.kind is None:
        return WholeDetokenizer(decode, context)
    if texts.kind.is_byte_level:
        return BytesDetokenizer(texts, context)
    return ElementsDetokenizer(texts, context)


class BytesDetokenizer:
    """Detokenizer of byte-level tokens: joins their bytes and reads them as UTF-8."""

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
        """Returns the text that `token_ids` add."""
        self._has_output = True
        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        """Returns an incomplete last character as a replacement character."""
        return self._decode(b"", True) if self._has_output else ""

    def fork(self) -> Self:
        """Copies the detokenizer; the copy continues independently."""
        other = copy(self)
        other._decoder = copy(self._decoder)
        other._decode = other._decoder.decode
        return other


class ElementsDetokenizer:
    """Detokenizer of tokens with a text each, mixed with runs of byte tokens."""

    def __init__(self, texts: TokenTexts, context: Sequence[int] = ()) -> None:
        assert texts.kind is not None, "the decoder supports streaming"
        self._texts = texts
        self._after = texts.kind.after
        self._later = texts.later.__getitem__
        self._stripped = texts.kind.stripped
        self._num_to_strip = texts.kind.num_stripped
        self._run: _Run | None = None
        self._is_first = True
        # Earlier tokens no longer change the text of the next token.
        self._is_plain = False
        self._has_output = not context
        self._follow(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that `token_ids` add."""
        self._has_output = True
        if self._is_plain:
            # Usual case. A byte or an empty token is no `str`, so that `join` raises TypeError.
            with suppress(TypeError):
                return "".join(map(self._later, token_ids))  # type: ignore[arg-type]
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Returns the pending run of bytes as text."""
        return self._end_run() if self._has_output else ""

    def fork(self) -> Self:
        """Copies the detokenizer; the copy continues independently."""
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
        """Removes the characters that are stripped from the start of the whole text."""
        while piece and self._num_to_strip:
            if not piece.startswith(self._stripped):
                self._num_to_strip = 0
                break
            piece = piece[1:]
            self._num_to_strip -= 1
        return piece

    def _follow(self, context: Sequence[int]) -> None:
        """Reads `context`: its start, and a run of bytes at its end."""
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
    """Run of byte tokens.

    Its text is the UTF-8 text of all bytes, or one replacement character for each byte if they are
    not valid UTF-8.
    """

    def __init__(self, after: ElementMaps, *, is_first: bool) -> None:
        self._after = after
        self._is_first = is_first
        self._bytes = bytearray()
        self._checker = _new_decoder("strict")
        self._is_broken = False
        self._num_shown = 0

    def push(self, byte: int) -> str:
        """Adds a byte; returns the replacement characters that are final if the run is broken."""
        self._bytes.append(byte)
        if not self._is_broken:
            try:
                self._checker.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._is_broken = True
        return self._show_replacements() if self._is_broken else ""

    def end(self) -> str:
        """Returns the rest of the run."""
        try:
            text = "" if self._is_broken else self._bytes[self._num_shown :].decode()
        except UnicodeDecodeError:  # its last character is incomplete
            self._is_broken = True
        return self._show_replacements() if self._is_broken else self._apply(text)

    def take_characters(self) -> str:
        """Returns the complete characters so far and marks them as shown.

        An incomplete one stays.
        """
        if self._is_broken:
            return ""
        num_incomplete = len(self._checker.getstate()[0])
        text = self._bytes[: len(self._bytes) - num_incomplete].decode()
        self._num_shown = len(self._bytes) - num_incomplete
        return self._apply(text) if text else ""

    def fork(self) -> Self:
        """Copies the run; the copy continues independently."""
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
    """Detokenizer that returns all text at the end, for decoders that need all tokens first."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = context
        self._num_context_chars = len(decode(context)) if context else 0
        self._token_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Stores `token_ids`; returns an empty text."""
        self._token_ids.extend(token_ids)
        return ""

    def finish(self) -> str:
        """Returns the text of all tokens."""
        token_ids = [*self._context, *self._token_ids]
        return self._decode(token_ids)[self._num_context_chars :] if token_ids else ""

    def fork(self) -> Self:
        """Copies the detokenizer; the copy continues independently."""
        other = copy(self)
        other._token_ids = list(self._token_ids)
        return other
