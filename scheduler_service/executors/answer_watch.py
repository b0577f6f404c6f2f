"""Which executors are too slow: the steps of one, beside signs of life of the others.

Pure: time is what callers say it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from scheduler_service.scheduler.values.plan import StepPlan

_S = 1_000_000_000


class FleetPulse:
    """When each executor last answered: steps, or, while it has none, that it is there.

    `num_steps`: how many all of them answered.
    """

    def __init__(self) -> None:
        self._latest_ns: dict[Hashable, int] = {}
        self.num_steps = 0

    def show(self, executor: Hashable, now_ns: int) -> None:
        """`executor` lives."""
        self._latest_ns[executor] = now_ns

    def forget(self, executor: Hashable) -> None:
        """It is none any more."""
        self._latest_ns.pop(executor, None)

    def is_another_alive(self, executor: Hashable, since_ns: int) -> bool:
        """Whether any but `executor` has shown life after `since_ns`."""
        return any(
            latest_ns > since_ns
            for other, latest_ns in self._latest_ns.items()
            if other != executor
        )


class Verdict(Enum):
    """What is to be done about an executor. ASK: whether others are there; then look again."""

    WAIT = "wait"
    ASK = "ask"
    GIVE_UP = "give up"


class AnswerWatch:
    """The steps that one executor has not answered.

    It is given up when the oldest of them takes longer than `patience` allows, by two looks, half
    of that time apart, and if another executor showed life between them. So the last that is there
    is not given up, nor are all of them if their machines, or this one, stood still: time counts
    only while others go on. After `patience.ceiling_s` it is given up whatever others do.
    `is_silent`: it does not answer when it is asked whether it is there.
    """

    def __init__(self, executor: Hashable, patience: StepPatience, pulse: FleetPulse) -> None:
        self.patience = patience
        self._executor = executor
        self._pulse = pulse
        self._in_flight: deque[StepSize] = deque()
        self._is_cut = False
        self._is_late = False
        self.is_silent = False
        # Of the oldest step. The half is worked out when it is asked for: mostly nobody does.
        self._since_ns = 0
        self._known_half_ns: int | None = None
        # Of the halves that passed in a row, those in which others went on; the first counts.
        self._half_since_ns = 0
        self._num_lively = 0

    @property
    def is_doubtful(self) -> bool:
        """Whether it should get no new requests: it is late, silent, or its connection broken."""
        return self._is_late or self._is_cut or self.is_silent

    @property
    def is_idle(self) -> bool:
        """Whether nothing is expected of it."""
        return not self._in_flight

    @property
    def earliest_look_ns(self) -> int:
        """No look is due before this."""
        return self._half_since_ns + int(self.patience.least_allowed_s * _S / 2)

    @property
    def look_at_ns(self) -> int | None:
        """When to look; None: never, as it is now."""
        if self._is_cut or not self._in_flight:
            return None
        return min(self._half_since_ns + self._half_ns, self._since_ns + self._ceiling_ns)

    @property
    def allowed_s(self) -> float:
        """How long the oldest step may take; 0 if there is none."""
        return 2 * self._half_ns / _S if self._in_flight else 0.0

    @property
    def _half_ns(self) -> int:
        """Half of what the oldest step may take."""
        if self._known_half_ns is None:
            allowed_s = self.patience.allowed_s(self._in_flight[0]) if self._in_flight else 0.0
            self._known_half_ns = int(allowed_s * _S / 2)
        return self._known_half_ns

    @property
    def _ceiling_ns(self) -> int:
        return int(self.patience.ceiling_s * _S)

    def waited_s(self, now_ns: int) -> float:
        """How long the oldest step has not been answered."""
        return (now_ns - self._since_ns) / _S

    def sent(self, size: StepSize, now_ns: int) -> None:
        """A step was sent."""
        self._in_flight.append(size)
        if len(self._in_flight) == 1:
            self._start(now_ns)

    def answered(self, now_ns: int) -> None:
        """The oldest step was answered."""
        size = self._in_flight.popleft()
        self.patience.observe(size, self.waited_s(now_ns))
        self._pulse.show(self._executor, now_ns)
        self._pulse.num_steps += 1
        self._is_late = False
        self._start(now_ns)

    def cut(self) -> None:
        """Its connection is broken: for how long it may be so is not about steps."""
        self._is_cut = True

    def mended(self, now_ns: int) -> None:
        """It is connected again; steps that were not answered begin anew."""
        self._is_cut = False
        self._start(now_ns)

    def _start(self, now_ns: int) -> None:
        self._since_ns = self._half_since_ns = now_ns
        self._num_lively = 0
        self._known_half_ns = None

    def look(self, now_ns: int) -> Verdict:
        """What is to be done now."""
        at_ns = self.look_at_ns
        if at_ns is None or now_ns < at_ns:
            return Verdict.WAIT
        is_first = self._half_since_ns == self._since_ns
        if is_first or self._pulse.is_another_alive(self._executor, self._half_since_ns):
            self._num_lively += 1
        else:
            self._num_lively = 0
        self._half_since_ns = now_ns
        self._is_late = not is_first
        if self._num_lively > 1 or now_ns >= self._since_ns + self._ceiling_ns:
            self.patience.gave_up()
            return Verdict.GIVE_UP
        return Verdict.ASK


# -- How long a step may take: what steps like it took, times a factor -----------------------------
#
# Pure: no clock, no I/O.

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
