"""What the losses of executors say, of a request and of the fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum

# So long a loss says that executors are lost for other reasons than a request, too.
STORM_NS = 600 * 10**9
_MAX_REMEMBERED = 64
# So long an executor that was lost may be on its way back.
RETURN_NS = 60 * 10**9
# So many losses in a row say nothing new of a request, if a life that came back answers nothing.
MAX_REPEATS = 4
# So many tokens after its first loss that loss is forgiven; twice as many after each further one.
FORGIVING_TOKENS = 16
# Where executors are lost for other reasons, too, or perhaps only the way to one was.
NUM_ALONE_IN_A_STORM = 3


class LossCause(Enum):
    """Why an executor is lost, and so what that says against the requests of its steps.

    DIED: it is gone, or breaks the contract. SILENT: it does not answer, and may hang, or be slow,
    or out of reach. BLAMELESS: it was asked to leave, or the fault is ours. WITHDRAWN: it is there,
    and its results were wrong (`circuit_breaker.py`), which says nothing of its requests.
    """

    DIED = "died"
    SILENT = "silent"
    BLAMELESS = "blameless"
    WITHDRAWN = "withdrawn"

    @property
    def says_nothing(self) -> bool:
        """Whether no request is accused."""
        return self in (LossCause.BLAMELESS, LossCause.WITHDRAWN)


@dataclass(frozen=True, slots=True)
class Loss:
    """One executor is lost.

    `life`: which one; the same one may come back. `has_answered`: a step, since it came (back).
    `num_living`: executors that took requests before, with this one. `in_flight`: requests computed
    by its `num_steps` steps in flight, even if they had left it.
    """

    cause: LossCause
    life: Hashable
    now_ns: int
    has_answered: bool
    num_living: int = 1
    in_flight: Collection[str] = ()
    num_steps: int = 1


@dataclass(slots=True)
class RequestLosses:
    """The executors that were lost while a step of one request was in flight.

    `in_succession`: the numbers of those without enough tokens in between to forgive the one
    before; `num_alone` of them with nothing else in flight. `num_trials`: how many were asked of it
    when it was isolated last, 0 if it never was. `num_tokens`: of its longest sequence, at the
    latest loss, `num_gained` of them since the one before. `lives`: of those executors.
    `any_silent`: some of them may be there.
    """

    in_succession: list[int] = field(default_factory=list)
    num_ever: int = 0
    num_alone: int = 0
    num_trials: int = 0
    num_tokens: int = 0
    num_gained: int = 0
    lives: set[Hashable] = field(default_factory=set)
    any_silent: bool = False
    _num_repeats: int = 0

    def is_repeated(self, loss: Loss) -> bool:
        """Whether a loss is that of an executor that was lost before, and is not well yet.

        It may be slow, or far. But where nothing else is left to be asked it is believed at last.
        """
        if loss.has_answered or loss.life not in self.lives:
            self._num_repeats = 0
            return False
        self._num_repeats += 1
        return self._num_repeats <= MAX_REPEATS

    def num_alone_allowed(self, *, is_storm: bool) -> int:
        """So many alone may be chance; the more, the longer a trial lasts."""
        least = NUM_ALONE_IN_A_STORM - 1 if is_storm else 0
        return least + (max(0, self.num_trials - 1) // FORGIVING_TOKENS).bit_length()

    def add(self, number: int, loss: Loss, num_tokens: int, *, is_alone: bool) -> None:
        """Loss `number`, when it has `num_tokens`."""
        self.num_gained = max(0, num_tokens - self.num_tokens)
        if self.num_gained >= FORGIVING_TOKENS << max(0, self.num_ever - 1):
            self.in_succession.clear()
            self.lives.clear()
            self.num_alone = 0
            self.any_silent = False
        self.in_succession.append(number)
        self.lives.add(loss.life)
        self.any_silent |= loss.cause is not LossCause.DIED
        self.num_ever += 1
        self.num_alone += is_alone
        self.num_tokens = num_tokens

    def explain(self, numbers: Collection[int]) -> None:
        """These losses were somebody else's fault."""
        self.in_succession = [number for number in self.in_succession if number not in numbers]


@dataclass(slots=True)
class FleetLosses:
    """The latest losses of all executors: when, and which requests were in flight.

    `num_losses`: of all there ever were, the number of the latest.
    """

    num_losses: int = 0
    _latest: deque[tuple[int, frozenset[str]]] = field(
        default_factory=lambda: deque(maxlen=_MAX_REMEMBERED)
    )
    # When executors were lost, and how many there were before.
    _num_living: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=_MAX_REMEMBERED)
    )
    # When a request was failed for losses, the latest first.
    _failed_ns: tuple[int, ...] = ()

    def add(self, loss: Loss, in_flight: frozenset[str]) -> None:
        """One more."""
        self.num_losses += 1
        self._latest.append((loss.now_ns, in_flight))
        self._num_living.append((loss.now_ns, loss.num_living))

    def explain(self, request_id: str, now_ns: int) -> bool:
        """Those with this request in flight were its fault, and say nothing of others.

        Returns whether that explains all of late, and no other request was failed of late.
        """
        kept = [each for each in self._latest if request_id not in each[1]]
        self._latest = deque(kept, maxlen=_MAX_REMEMBERED)
        is_first = not self.is_proven(now_ns)
        self._failed_ns = (now_ns, *self._failed_ns[:1])
        return is_first and not any(now_ns - lost_ns < STORM_NS for lost_ns, _ in kept)

    def is_proven(self, now_ns: int) -> bool:
        """Whether a request was failed of late: then there may be more of its kind."""
        return any(now_ns - failed_ns < STORM_NS for failed_ns in self._failed_ns)

    def is_storm(self, now_ns: int, request_id: str, suspects: Collection[str] = ()) -> bool:
        """Whether some executor was lost lately for which neither it nor `suspects` may account."""
        return any(
            now_ns - lost_ns < STORM_NS
            and request_id not in in_flight
            and in_flight.isdisjoint(suspects)
            for lost_ns, in_flight in self._latest
        )

    def return_expected_until_ns(self, now_ns: int) -> int:
        """Until when executors may come back, where there was more than one before; 0: none may."""
        times = [at_ns for at_ns, num_living in self._num_living if num_living > 1]
        until_ns = max(times, default=-RETURN_NS) + RETURN_NS
        return until_ns if until_ns > now_ns else 0
