"""Which faults happen when, drawn from a seed: `Schedule`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.chaos.faults import FAULTS, Fault

# Output tokens of all streams, between the beginnings of two faults and during one.
_LEAST_TOKENS, _MOST_TOKENS = 100, 3000


@dataclass(frozen=True, slots=True)
class Moment:
    """`begins_at`: output tokens of all streams by then; `num_tokens`: and from then to its end."""

    begins_at: int
    num_tokens: int
    kind: str
    fault: Fault

    def __str__(self) -> str:
        return (
            f"after {self.begins_at} tokens, for {self.num_tokens}: {self.kind}"
            f" ({', '.join(self.fault.victims)}) {self.fault}"
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The moments in order of their beginnings; faults may overlap."""

    seed: int
    moments: tuple[Moment, ...]

    @classmethod
    def drawn(cls, seed: int, num_faults: int, kinds: Sequence[str] = tuple(FAULTS)) -> Schedule:
        """The same for the same seed, number and kinds."""
        rng = random.Random(seed)
        moments, begins_at = [], 0
        for _ in range(num_faults):
            begins_at += rng.randint(_LEAST_TOKENS, _MOST_TOKENS)
            kind = rng.choice(list(kinds))
            num_tokens = rng.randint(_LEAST_TOKENS, _MOST_TOKENS)
            moments.append(Moment(begins_at, num_tokens, kind, FAULTS[kind](rng)))
        return cls(seed, tuple(moments))

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}:", *(f"  {moment}" for moment in self.moments)])
