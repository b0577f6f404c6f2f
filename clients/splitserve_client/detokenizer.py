"""Text from a stream of tokens, piece by piece, and stop strings in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so more tokens than this without a whole one are no text.
_MAX_PENDING_TOKENS = 64
_NUM_CONTEXT_TOKENS = 8


class Detokenizer:
    """Turns tokens into text such that the pieces add up to the text of all tokens at once.

    What a token adds depends on those before it: a character may be spread over several tokens, and
    many tokenizers drop the space before the first one. So each piece is the difference between
    decoding a short window with and without the new tokens.

    `context_token_ids`: tokens before the first one, whose text is not returned (the prompt, when
    the output continues it).
    """

    def __init__(self, decode: Decode, context_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = _last_characters(decode, context_token_ids)
        self._num_read = len(self._token_ids)
        self._read_text = decode(self._token_ids) if self._token_ids else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` bring; never ends within a character."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """What was held back: an incomplete character, as replacement characters."""
        text = self._decode(self._token_ids) if self._token_ids else ""
        piece = text[len(self._read_text) :]
        self._advance()
        return piece

    def _push_one(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        num_pending = len(self._token_ids) - self._num_read
        if len(text) <= len(self._read_text):
            return ""
        if text.endswith(_REPLACEMENT) and num_pending <= _MAX_PENDING_TOKENS:
            return ""
        piece = text[len(self._read_text) :]
        self._advance()
        return piece

    def _advance(self) -> None:
        """The tokens since the last piece become the window of the next one."""
        self._token_ids = self._token_ids[self._num_read :]
        self._num_read = len(self._token_ids)
        self._read_text = self._decode(self._token_ids) if self._token_ids else ""


def _last_characters(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """Some of the last tokens, not beginning within a character."""
    for num_tokens in range(_NUM_CONTEXT_TOKENS, _MAX_PENDING_TOKENS):
        last = list(token_ids[-num_tokens:])
        if num_tokens >= len(token_ids) or not decode(last).startswith(_REPLACEMENT):
            break
    return last


class StopStrings:
    """Cuts text before the first stop string; holds back what may be the start of one.

    A stop string counts if it ends in text that may end, wherever it began.
    """

    def __init__(self, stop_strings: Sequence[str] = ()) -> None:
        self._stop_strings = tuple(stop for stop in stop_strings if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """The part of the text so far that can be shown and was not yet; see also `found`.

        `may_end`: whether a stop string that ends within `text` counts; not so in the text of the
        first `min_tokens` tokens.
        """
        if self.found is not None:
            return ""
        num_held = len(self._held)
        text = self._held + text
        if may_end and (hits := self._hits(text, num_held)):
            position, _, self.found = min(hits)
            self._held = ""
            return text[:position]
        keep = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _hits(self, text: str, num_held: int) -> list[tuple[int, int, str]]:
        """Where each stop string is first found that ends after `num_held` characters of `text`.

        One may end before that, in text that was not to end.
        """
        starts = [
            (text.find(stop, max(num_held + 1 - len(stop), 0)), stop) for stop in self._stop_strings
        ]
        return [(start, -len(stop), stop) for start, stop in starts if start >= 0]

    def finish(self) -> str:
        """What was held back; nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
