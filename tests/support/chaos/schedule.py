"""Which faults happen when, drawn from a seed: `Schedule`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.chaos.faults import FAULTS, Fault

# Output tokens of all streams, between the beginnings of two faults and during one.
_LEAST_TOKENS, _MOST_TOKENS = 100, 2000


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
        moments: list[Moment] = []
        for _ in range(num_faults):
            gap = _draw_tokens(rng)
            moments.append(_drawn_after(moments, gap, rng.choice(list(kinds)), rng))
        return cls(seed, tuple(moments))

    @classmethod
    def of_each(cls, seed: int, kinds: Sequence[str]) -> Schedule:
        """Each kind once, in this order."""
        rng = random.Random(seed)
        moments: list[Moment] = []
        for kind in kinds:
            moments.append(_drawn_after(moments, _draw_tokens(rng), kind, rng))
        return cls(seed, tuple(moments))

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}:", *(f"  {moment}" for moment in self.moments)])


def _draw_tokens(rng: random.Random) -> int:
    return rng.randint(_LEAST_TOKENS, _MOST_TOKENS)


def _drawn_after(moments: Sequence[Moment], gap: int, kind: str, rng: random.Random) -> Moment:
    """`gap`: output tokens since the beginning of the last of `moments`."""
    begins_at = gap + (moments[-1].begins_at if moments else 0)
    num_tokens = _draw_tokens(rng)
    return Moment(begins_at, num_tokens, kind, FAULTS[kind](rng))
