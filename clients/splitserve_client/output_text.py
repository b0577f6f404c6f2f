"""Text of one output sequence, up to the stop string that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from splitserve_client.detokenizer import Detokenizer
from splitserve_client.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules for turning tokens into text; `stream_text` explains the first three.

    `hidden_token_ids`: tokens that add no text.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    hidden_token_ids: frozenset[int] = frozenset()


class OutputText:
    """Turns tokens into text. `num_tokens`: tokens read, including those of the stop string.

    `min_tokens`: stop strings do not end the text within this many first tokens.
    """

    def __init__(self, detokenizer: Detokenizer, rules: TextRules, min_tokens: int) -> None:
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._hidden = rules.hidden_token_ids
        self._stops: StopStrings | None = None
        if any(rules.stop_strings):
            self._stops = StopStrings(rules.stop_strings, include=rules.include_stop_string)
        self._min_tokens = min_tokens

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the text; None if no stop string did."""
        return None if self._stops is None else self._stops.found

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Returns the text that `token_ids` add, and the number of tokens read: 0 after the end."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(self._shown(token_ids)), len(token_ids)
        if self._stops.found is not None:
            return "", 0
        pieces: list[str] = []
        # Token by token: the end must not depend on how many tokens arrive together.
        for number, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            text = self._detokenizer.push(self._shown((token_id,)))
            pieces.append(self._stops.push(text, may_end=self._may_end))
            if self._stops.found is not None:
                return "".join(pieces), number
        return "".join(pieces), len(token_ids)

    def finish(self) -> str:
        """Returns the text that was held back; no token may follow."""
        if self._stops is None:
            return self._detokenizer.finish()
        if self._stops.found is not None:
            return ""
        text = self._stops.push(self._detokenizer.finish(), may_end=self._may_end)
        return text + self._stops.finish()

    @property
    def _may_end(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._hidden.isdisjoint(token_ids):
            return token_ids
        return [token_id for token_id in token_ids if token_id not in self._hidden]


class TokenNumbers:
    """Detokenizer that shows token ids as numbers, for models without a tokenizer."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the token ids, separated by spaces."""
        if not token_ids:
            return ""
        separator, self._separator = self._separator, " "
        return separator + " ".join(map(str, token_ids))

    def finish(self) -> str:
        """Returns an empty text: nothing is held back."""
        return ""

    def fork(self) -> Self:
        """Copies the detokenizer; the copy continues independently."""
        return copy(self)
