"""Which executors are too slow: the steps of one, beside signs of life of the others.

Pure: time is what callers say it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum

from scheduler_service.executors.step_patience import StepPatience, StepSize

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
