"""Workloads that are drawn from a seed: independent requests, conversations, shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from splitserve_bench.workloads.conversation import Conversation, Piece, Turn
from splitserve_bench.workloads.distributions import Distribution, Rng


def _constantly(text: str) -> Distribution:
    return Distribution.parse(text)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prompts begin with one of `num_groups` texts of `num_tokens`, each as often as the others."""

    num_tokens: int = 0
    num_groups: int = 1

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        """Of `TOKENS` or `TOKENS:GROUPS`. Raises ValueError."""
        tokens, _, groups = text.partition(":")
        if not tokens.isdecimal() or not (groups or "1").isdecimal() or groups == "0":
            raise ValueError(f"{text!r} is no shared prefix; allowed: TOKENS or TOKENS:GROUPS")
        return cls(int(tokens), int(groups or "1"))


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """What is drawn. `prompt_tokens`: what each turn adds, beside the shared prefix.

    `burstiness`: the coefficient of variation of the times between arrivals: 0 is a metronome, 1 a
    Poisson process; above, arrivals come in bursts (a gamma distribution).
    """

    prompt_tokens: Distribution = field(default_factory=lambda: _constantly("512"))
    output_tokens: Distribution = field(default_factory=lambda: _constantly("128"))
    shared_prefix: SharedPrefix = field(default_factory=SharedPrefix)
    turns: Distribution = field(default_factory=lambda: _constantly("1"))
    think_s: Distribution = field(default_factory=lambda: _constantly("0"))
    conversations_per_s: float | None = None
    burstiness: float = 1.0

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Without an end. The same seed draws the same, and the same prompts at any rate."""
        arriving, asking = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        arrival_s, next_key = 0.0, 0
        while True:
            arrival_s += self._gap_s(arriving)
            turns = tuple(self._turns(asking, next_key))
            next_key += len(turns)
            yield Conversation(arrival_s, turns)

    def _gap_s(self, rng: Rng) -> float:
        if self.conversations_per_s is None:
            return 0.0
        if self.burstiness == 0:
            return 1 / self.conversations_per_s
        variance = self.burstiness**2
        return float(rng.gamma(1 / variance, variance / self.conversations_per_s))

    def _turns(self, rng: Rng, first_key: int) -> Iterator[Turn]:
        group = int(rng.integers(self.shared_prefix.num_groups))
        shared = Piece(-1 - group, self.shared_prefix.num_tokens)
        for number in range(self.turns.draw_count(rng)):
            own = Piece(first_key + number, self.prompt_tokens.draw_count(rng))
            pieces = (shared, own) if number == 0 and shared.num_tokens else (own,)
            think_s = self.think_s.draw(rng) if number else 0.0
            yield Turn(pieces, self.output_tokens.draw_count(rng), think_s)
