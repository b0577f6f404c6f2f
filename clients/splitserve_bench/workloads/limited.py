"""As much of a workload as is asked for, faster or slower, and cut to what a model takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from splitserve_bench.workloads.conversation import Conversation, Piece, Turn


@dataclass(frozen=True, slots=True)
class Limits:
    """`speed`: 2 plays it twice as fast. `duration_s`: of arrivals, after that. None: no limit."""

    num_conversations: int | None = None
    duration_s: float | None = None
    speed: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def apply(self, conversations: Iterator[Conversation]) -> Iterator[Conversation]:
        """Stops reading at the first conversation that is beyond them."""
        if self.num_conversations == 0:
            return
        for number, conversation in enumerate(conversations, start=1):
            arrival_s = conversation.arrival_s / self.speed
            if self.duration_s is not None and arrival_s > self.duration_s:
                return
            yield replace(
                conversation, arrival_s=arrival_s, turns=tuple(map(self._cut, conversation.turns))
            )
            if number == self.num_conversations:
                return

    def _cut(self, turn: Turn) -> Turn:
        num_output_tokens = min(turn.num_output_tokens, self.max_output_tokens or 2**63)
        return Turn(self._cut_prompt(turn.pieces), num_output_tokens, turn.think_s)

    def _cut_prompt(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Its beginning: what prompts have in common is there."""
        left = self.max_prompt_tokens
        if left is None:
            return pieces
        cut = []
        for piece in pieces:
            cut.append(replace(piece, num_tokens=min(piece.num_tokens, left)))
            left -= cut[-1].num_tokens
            if left == 0:
                break
        return tuple(cut)
