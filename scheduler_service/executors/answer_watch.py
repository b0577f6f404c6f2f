"""Detection of executors that are too slow, and the time limit of a step.

An executor is judged by its unanswered steps and by signs of life of the other executors. All of
this is pure: the caller passes the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from scheduler_service.scheduler.values import StepPlan

_S = 1_000_000_000


class SignsOfLife:
    """Time of the latest sign of life of each executor: an answered step, or GetInfo while idle.

    `num_steps`: steps answered by all executors.
    """

    def __init__(self) -> None:
        self._latest_ns: dict[Hashable, int] = {}
        self.num_steps = 0

    def show(self, executor: Hashable, now_ns: int) -> None:
        """Notes a sign of life of `executor`."""
        self._latest_ns[executor] = now_ns

    def forget(self, executor: Hashable) -> None:
        """Removes an executor that has left."""
        self._latest_ns.pop(executor, None)

    def is_another_alive(self, executor: Hashable, since_ns: int) -> bool:
        """Returns whether an executor other than `executor` has shown life after `since_ns`."""
        return any(
            latest_ns > since_ns
            for other, latest_ns in self._latest_ns.items()
            if other != executor
        )


class LivenessVerdict(Enum):
    """Verdict of a look at an executor. ASK: ask idle executors for signs of life, look again."""

    WAIT = "wait"
    ASK = "ask"
    GIVE_UP = "give up"


class AnswerWatch:
    """Unanswered steps of one executor, and the verdict on it.

    The executor is given up when its oldest step takes longer than `patience` allows. That takes
    two looks, half of the allowed time apart, and a sign of life of another executor between them.
    So the last executor is not given up, nor are all executors if their machines, or this one,
    stood still: time counts only while other executors go on. After `patience.ceiling_s` the
    executor is given up, whatever the others do. `is_silent`: the executor does not answer GetInfo.
    """

    def __init__(self, executor: Hashable, patience: StepPatience, pulse: SignsOfLife) -> None:
        self.patience = patience
        self._executor = executor
        self._pulse = pulse
        self._in_flight: deque[StepSize] = deque()
        self._is_cut = False
        self._is_late = False
        self.is_silent = False
        # Start of the oldest step, and half of its allowed time. The half is computed on demand,
        # because most steps are answered before anything needs it.
        self._since_ns = 0
        self._known_half_ns: int | None = None
        # Start of the current half, and the number of halves in a row in which other executors
        # showed life; the first half always counts.
        self._half_since_ns = 0
        self._num_lively = 0

    @property
    def is_doubtful(self) -> bool:
        """Whether the executor should get no new requests: it is late, silent or disconnected."""
        return self._is_late or self._is_cut or self.is_silent

    @property
    def is_idle(self) -> bool:
        """Whether the executor has answered all its steps."""
        return not self._in_flight

    @property
    def earliest_look_ns(self) -> int:
        """Lower bound of `look_at_ns`, cheap to compute."""
        return self._half_since_ns + int(self.patience.least_allowed_s * _S / 2)

    @property
    def look_at_ns(self) -> int | None:
        """Deadline of the executor's next check; None without a connection or a step in flight."""
        if self._is_cut or not self._in_flight:
            return None
        return min(self._half_since_ns + self._half_ns, self._since_ns + self._ceiling_ns)

    @property
    def allowed_s(self) -> float:
        """Seconds that the oldest step may take; 0 if no step is in flight."""
        return 2 * self._half_ns / _S if self._in_flight else 0.0

    @property
    def _half_ns(self) -> int:
        """Half of the time in nanoseconds that the oldest step may take."""
        if self._known_half_ns is None:
            allowed_s = self.patience.allowed_s(self._in_flight[0]) if self._in_flight else 0.0
            self._known_half_ns = int(allowed_s * _S / 2)
        return self._known_half_ns

    @property
    def _ceiling_ns(self) -> int:
        return int(self.patience.ceiling_s * _S)

    def waited_s(self, now_ns: int) -> float:
        """Returns for how many seconds the oldest step has not been answered."""
        return (now_ns - self._since_ns) / _S

    def sent(self, size: StepSize, now_ns: int) -> None:
        """Notes that a step was sent."""
        self._in_flight.append(size)
        if len(self._in_flight) == 1:
            self._start(now_ns)

    def answered(self, now_ns: int) -> None:
        """Removes the oldest step, which was answered, and learns from its duration."""
        size = self._in_flight.popleft()
        self.patience.observe(size, self.waited_s(now_ns))
        self._pulse.show(self._executor, now_ns)
        self._pulse.num_steps += 1
        self._is_late = False
        self._start(now_ns)

    def progressed(self, now_ns: int) -> None:
        """Notes that the oldest step got tokens; the rest may take as long as the whole step."""
        self._pulse.show(self._executor, now_ns)
        self._is_late = False
        self._start(now_ns)

    def cut(self) -> None:
        """Notes that the connection is broken: no look is due until `mended`.

        The link, not this watch, limits how long a connection may be broken.
        """
        self._is_cut = True

    def mended(self, now_ns: int) -> None:
        """Notes that the connection is back; the time of unanswered steps starts anew."""
        self._is_cut = False
        self._start(now_ns)

    def _start(self, now_ns: int) -> None:
        self._since_ns = self._half_since_ns = now_ns
        self._num_lively = 0
        self._known_half_ns = None

    def look(self, now_ns: int) -> LivenessVerdict:
        """Returns the verdict at `now_ns`. A GIVE_UP makes `patience` more lenient."""
        at_ns = self.look_at_ns
        if at_ns is None or now_ns < at_ns:
            return LivenessVerdict.WAIT
        is_first = self._half_since_ns == self._since_ns
        if is_first or self._pulse.is_another_alive(self._executor, self._half_since_ns):
            self._num_lively += 1
        else:
            self._num_lively = 0
        self._half_since_ns = now_ns
        self._is_late = not is_first
        if self._num_lively > 1 or now_ns >= self._since_ns + self._ceiling_ns:
            self.patience.gave_up()
            return LivenessVerdict.GIVE_UP
        return LivenessVerdict.ASK


# -- Time limit of a step --------------------------------------------------------------------------

# A step may take so many times what steps of its size took.
FACTOR = 3.0
# Averages of a size are used after so many steps: the first steps are slow, because something is
# loaded, compiled or captured.
BELIEVED_STEPS = 8
# Extra factor on a step that the executor measured itself, used until averages are believed. The
# executor knows that nothing is compiled any more, but not which processes will share its machine.
# Eight times the least allowed time is longer than almost every stall seen of a sound process. An
# executor that is given up wrongly loses one recompute, and comes back with twice the time.
FIRST_LENIENCE = 8
# An executor that was given up gets twice the time, up to MAX_LENIENCE times. GOOD_STEPS steps in
# time halve that again.
MAX_LENIENCE = 64
GOOD_STEPS = 32
_NEWEST_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class StepSize:
    """Amount of work of a step.

    `num_attended`: pairs of a new token and a token that it attends to. `num_turns`: most tokens
    that a row gets, one a turn; `num_tokens` and `num_attended` count the work of one turn.
    """

    num_tokens: int
    num_attended: int
    num_turns: int = 1

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> StepSize:
        """Returns the size of `plan`.

        A moved block counts as its tokens: moving costs less than computing them.
        """
        work = plan.work
        num_tokens = plan.num_tokens + len(plan.moves) * block_size
        for row in plan.new_rows:
            if row.encoder_token_ids is not None or row.encoder_features is not None:
                num_tokens += row.sequence.request.num_encoder_tokens
        if len(work.token_ids) == 0 and work.drafts is None:  # the common case: one token a row
            num_attended = int(np.add.reduce(work.num_computed_tokens)) + len(work.row_ids)
        else:
            num_inputs = work.num_inputs
            num_known = work.num_computed_tokens.astype(np.int64) + num_inputs
            num_attended = int(np.dot(num_known, num_inputs))
        return cls(num_tokens, num_attended, work.num_passes)


@dataclass(slots=True)
class _Kind:
    """Running averages over steps with about the same number of tokens."""

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
        """Returns the most seconds a step of `size` should take, scaled up from the averages.

        Time grows at most in proportion to the work. A smaller step is not given less time,
        because part of it is constant.
        """
        by_tokens = size.num_tokens / max(self.num_tokens, 1)
        by_attended = size.num_attended / max(self.num_attended, 1)
        return self.took_s * max(by_tokens, by_attended, 1.0)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Step that an executor measured before it joined; later steps need no compilation."""

    size: StepSize
    took_s: float


class StepPatience:
    """Time limits of steps for one life of an executor, learned from its answered steps.

    `ceiling_s`: the largest limit, also used while nothing is known. `floor_s`: the smallest limit;
    a process that shares its machine may wait so long to be scheduled. `measured`: a step that the
    executor measured itself, which limits its first steps. Steps of other executors are not used: a
    GPU may take a moment where a CPU takes a minute, and another may have compiled earlier.
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
        """Smallest time limit of any step, in seconds."""
        return self._floor_s

    def allowed_s(self, size: StepSize) -> float:
        """Returns the time limit of a step of `size` in seconds."""
        return min(self._expected_s(size) * self._lenience, self.ceiling_s)

    def observe(self, size: StepSize, took_s: float) -> None:
        """Learns from an answered step of `size` that took `took_s` seconds."""
        expected_s = took_s if took_s <= self._floor_s else self._expected_s(size)
        if took_s <= expected_s:
            self._take_good()
        # Capped: a step that waited for a suspended machine says little about the next step.
        took_s = min(took_s, expected_s)
        if size.num_turns > 1:
            return  # the number of turns that the step really took is unknown here
        bits = size.num_tokens.bit_length()
        if bits in self._kinds:
            self._kinds[bits].take(size, took_s)
        else:
            self._kinds[bits] = _Kind(took_s, size.num_tokens, size.num_attended)

    def gave_up(self) -> None:
        """Doubles the time limits, because the executor was given up for a late step.

        If this life of the executor comes back, it was alive, and the limit was too short.
        """
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
