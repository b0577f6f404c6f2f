"""The values of a workload: conversations, their turns, and what prompts have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. Equal keys are equal tokens; a shorter one begins as a longer does."""

    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what it adds to the prompt and answer before it, and how much it wants.

    `think_s`: how long after the answer before it, if there is one.
    """

    pieces: tuple[Piece, ...]
    num_output_tokens: int
    think_s: float = 0.0

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens that were not there before."""
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other. `arrival_s`: of the first, since the beginning of the load."""

    arrival_s: float
    turns: tuple[Turn, ...]
