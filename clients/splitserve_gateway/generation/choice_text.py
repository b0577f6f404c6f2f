"""The text of one choice, up to what ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from splitserve_client import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a text. `token_ids`: with those that end it by the model's own rule.

    `is_included`: whether the stop string or token that ended a text is part of it. `min_tokens`:
    no string ends a text within the first so many tokens.
    """

    strings: tuple[str, ...]
    token_ids: frozenset[int]
    is_included: bool
    min_tokens: int


class ChoiceText:
    """Turns the tokens of one choice into text; `stop_string` is what ended it, if one did."""

    def __init__(self, detokenizer: Detokenizer, rule: StopRule) -> None:
        self._detokenizer = detokenizer
        self._rule = rule
        self._stops: StopStrings | None = None
        if rule.strings:
            self._stops = StopStrings(rule.strings, include=rule.is_included)
        self._num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return None if self._stops is None else self._stops.found

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The text that `token_ids` bring, and how many of them do, up to the stop string."""
        if self._stops is None:
            return self._detokenizer.push(self._shown(token_ids)), len(token_ids)
        texts = []
        for number, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text = self._detokenizer.push(self._shown((token_id,)))
            texts.append(self._stops.push(text, may_end=self._may_end))
            if self._stops.found is not None:
                return "".join(texts), number
        return "".join(texts), len(token_ids)

    def finish(self) -> str:
        """What was held back; nothing more comes."""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return rest
        if self._stops.found is not None:
            return ""
        return self._stops.push(rest, may_end=self._may_end) + self._stops.finish()

    @property
    def _may_end(self) -> bool:
        return self._num_tokens > self._rule.min_tokens

    def _shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._rule.is_included or self._rule.token_ids.isdisjoint(token_ids):
            return token_ids
        return [token_id for token_id in token_ids if token_id not in self._rule.token_ids]


def ending_token_ids(
    eos_token_ids: Collection[int], stop_token_ids: Collection[int], *, ignore_eos: bool
) -> frozenset[int]:
    """The tokens that end a text."""
    return frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset(eos_token_ids))
