"""What an answer of the gateway says, however it was divided into events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

# Different in every answer; how much of a prompt was cached is another matter.
OWN = {
    "id",
    "model",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "cached_tokens",
    "sequence_number",
}


@dataclass(slots=True)
class HttpAnswer:
    """By choice: its text, what its tokens are and score, and its end. `last`: the last event."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    last: Any = None

    @classmethod
    def of(cls, stream: str) -> HttpAnswer:
        """Of all that was streamed."""
        answer = cls()
        for line in stream.split("\n"):
            answer.add_line(line)
        return answer

    @classmethod
    def whole(cls, content: object) -> HttpAnswer:
        """Of one that was not streamed."""
        return cls(last=without_own(content))

    def add_line(self, line: str) -> dict[str, Any] | None:
        """Takes a line of the stream; returns its event, if it is one."""
        if not line.startswith("data: {"):
            return None
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        self.last = without_own(event)
        if isinstance(event.get("delta"), str):
            self.texts[0] = self.texts.get(0, "") + event["delta"]
        for choice in event.get("choices", ()):
            self._add_choice(choice)
        return event

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        self.texts[index] = self.texts.get(index, "") + text
        logprobs = choice.get("logprobs") or {}
        self.tokens.setdefault(index, []).extend(logprobs.get("tokens", []))
        self.scores.setdefault(index, []).extend(logprobs.get("token_logprobs", []))
        if choice["finish_reason"] is not None:
            self.ends[index] = choice["finish_reason"]

    def begins(self, other: HttpAnswer) -> bool:
        """Whether `other` may have gone on from here."""
        return all(other.texts.get(i, "").startswith(text) for i, text in self.texts.items())


def without_own(value: Any) -> Any:  # noqa: ANN401
    """What two answers to the same request have in common."""
    if isinstance(value, dict):
        return {name: without_own(part) for name, part in value.items() if name not in OWN}
    return [without_own(part) for part in value] if isinstance(value, list) else value
