"""How long a step may take: what steps like it took, times a factor.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.core.plan import StepPlan

FACTOR = 3.0
# So many steps of a size are seen before they are believed: the first are slow, because something
# is loaded, compiled or captured.
BELIEVED_STEPS = 8
# Until then an executor that has measured a step by itself has so many times what that one says: it
# knows that nothing is compiled any more, but not who else will be on its machine. Eight times the
# least that is ever allowed is longer than almost all that was seen to hold up a sound process, and
# whoever is given up wrongly loses one recompute, and comes back with twice the time.
FIRST_LENIENCE = 8
# Whoever was given up too early gets twice the time, up to so much; so many good steps halve it.
MAX_LENIENCE = 64
GOOD_STEPS = 32
_NEWEST_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class StepSize:
    """What there is to do. `num_attended`: pairs of a new token and one that it attends to.

    `num_turns`: so often at most rows get a token; the others are those of each turn.
    """

    num_tokens: int
    num_attended: int
    num_turns: int = 1

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> StepSize:
        """A block that is moved counts as its tokens: it is moved because that costs less."""
        work = plan.work
        num_tokens = plan.num_tokens + len(plan.moves) * block_size
        for row in plan.new_rows:
            if row.encoder_token_ids is not None:
                num_tokens += len(row.encoder_token_ids)
        if len(work.token_ids) == 0 and work.drafts is None:  # one token each, as mostly
            num_attended = int(np.add.reduce(work.num_computed_tokens)) + len(work.row_ids)
        else:
            num_inputs = work.num_inputs
            num_known = work.num_computed_tokens.astype(np.int64) + num_inputs
            num_attended = int(np.dot(num_known, num_inputs))
        return cls(num_tokens, num_attended, work.num_passes)


@dataclass(slots=True)
class _Kind:
    """Running averages over steps of about the same number of tokens."""

    took_s: float
    num_tokens: float
    num_attended: float
    num_steps: int = 1

    def take(self, size: StepSize, took_s: float) -> None:
        self.num_steps += 1
        self.took_s += _NEWEST_WEIGHT * (took_s - self.took_s)
        self.num_tokens += _NEWEST_WEIGHT * (size.num_tokens - self.num_tokens)
        self.num_attended += _NEWEST_WEIGHT * (size.num_attended - self.num_attended)

    def most_s(self, size: StepSize) -> float:
        """What a step grows by, it grows by at most in proportion; part of it is always there."""
        by_tokens = size.num_tokens / max(self.num_tokens, 1)
        by_attended = size.num_attended / max(self.num_attended, 1)
        return self.took_s * max(by_tokens, by_attended, 1.0)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that an executor ran before it joined; nothing that comes later has to be compiled."""

    size: StepSize
    took_s: float


class StepPatience:
    """With one life of an executor; `ceiling_s` while nothing is known, and the most there is.

    `floor_s`: the least. A process that shares its machine may wait so long for a turn.
    `measured`: by the executor itself; its first steps go by that. Not by those of others: what
    takes a GPU a moment takes a CPU a minute, and who has compiled says nothing of who has not.
    """

    def __init__(
        self, floor_s: float, ceiling_s: float, measured: MeasuredStep | None = None
    ) -> None:
        self._measured = measured and _Kind(
            measured.took_s, measured.size.num_tokens, measured.size.num_attended
        )
        self._floor_s = min(floor_s, ceiling_s)
        self.ceiling_s = ceiling_s
        self._kinds: dict[int, _Kind] = {}
        self._lenience = 1
        self._num_good = 0

    @property
    def least_allowed_s(self) -> float:
        """No step is allowed less."""
        return self._floor_s

    def allowed_s(self, size: StepSize) -> float:
        """How long a step may take before its executor is doubted."""
        return min(self._expected_s(size) * self._lenience, self.ceiling_s)

    def observe(self, size: StepSize, took_s: float) -> None:
        """Learns from a step that was answered."""
        expected_s = took_s if took_s <= self._floor_s else self._expected_s(size)
        if took_s <= expected_s:
            self._take_good()
        # However long it took: one that waited for a suspended machine says little of the next.
        took_s = min(took_s, expected_s)
        if size.num_turns > 1:
            return  # how many turns it took is not known here
        bits = size.num_tokens.bit_length()
        if bits in self._kinds:
            self._kinds[bits].take(size, took_s)
        else:
            self._kinds[bits] = _Kind(took_s, size.num_tokens, size.num_attended)

    def gave_up(self) -> None:
        """The executor was given up for a step; should this life of it come back, it was alive."""
        self._lenience = min(2 * self._lenience, MAX_LENIENCE)
        self._num_good = 0

    def _expected_s(self, size: StepSize) -> float:
        believed = [kind for kind in self._kinds.values() if kind.num_steps >= BELIEVED_STEPS]
        factor = 1
        if not believed and self._measured:
            believed, factor = [self._measured], FIRST_LENIENCE
        most_s = min((kind.most_s(size) for kind in believed), default=self.ceiling_s)
        most_s *= size.num_turns
        return min(factor * max(FACTOR * most_s, self._floor_s), self.ceiling_s)

    def _take_good(self) -> None:
        self._num_good += 1
        if self._num_good >= GOOD_STEPS:
            self._lenience, self._num_good = max(self._lenience // 2, 1), 0
