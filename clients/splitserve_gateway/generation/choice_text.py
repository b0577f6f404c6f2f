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
        self._stops = StopStrings(rule.strings) if rule.strings else None
        self._num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return None if self._stops is None else self._stops.found

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` bring."""
        shown = token_ids
        if not self._rule.is_included and not self._rule.token_ids.isdisjoint(token_ids):
            shown = [token_id for token_id in token_ids if token_id not in self._rule.token_ids]
        if self._stops is None:
            return self._detokenizer.push(shown)
        return self._cut(self._stops, shown)

    def _cut(self, stops: StopStrings, token_ids: Sequence[int]) -> str:
        num_early = max(self._rule.min_tokens - self._num_tokens, 0)
        self._num_tokens += len(token_ids)
        text = stops.push(self._detokenizer.push(token_ids[:num_early]), may_end=False)
        text += stops.push(self._detokenizer.push(token_ids[num_early:]))
        return text + self._included()

    def finish(self) -> str:
        """What was held back; nothing more comes."""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return rest
        if self._stops.found is not None:
            return ""
        may_end = self._num_tokens > self._rule.min_tokens
        text = self._stops.push(rest, may_end=may_end) + self._included()
        return text + self._stops.finish()

    def _included(self) -> str:
        return (self.stop_string or "") if self._rule.is_included else ""


def ending_token_ids(
    eos_token_ids: Collection[int], stop_token_ids: Collection[int], *, ignore_eos: bool
) -> frozenset[int]:
    """The tokens that end a text."""
    return frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset(eos_token_ids))
