"""What the losses of executors say, of a request and of the fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum

# So long a loss says that executors are lost for other reasons than a request, too.
STORM_NS = 600 * 10**9
_MAX_REMEMBERED = 64
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
    """

    cause: LossCause
    life: Hashable
    now_ns: int
    has_answered: bool


@dataclass(slots=True)
class RequestLosses:
    """The executors that were lost while a step of one request was in flight.

    `in_succession`: the numbers of those without enough tokens in between to forgive the one
    before; `num_alone` of them with nothing else in flight. `num_trials`: how many were asked of it
    when it was isolated last, 0 if it never was. `num_tokens`: of its longest sequence, at the
    latest loss. `lives`: of those executors. `any_silent`: some of them may be there.
    """

    in_succession: list[int] = field(default_factory=list)
    num_ever: int = 0
    num_alone: int = 0
    num_trials: int = 0
    num_tokens: int = 0
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

    def add(self, number: int, loss: Loss, num_tokens: int, *, is_alone: bool) -> int:
        """Loss `number`, when it has `num_tokens`; how many of them it got since the one before."""
        num_gained = max(0, num_tokens - self.num_tokens)
        if num_gained >= FORGIVING_TOKENS << max(0, self.num_ever - 1):
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
        return num_gained

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

    def add(self, now_ns: int, in_flight: frozenset[str]) -> None:
        """One more."""
        self.num_losses += 1
        self._latest.append((now_ns, in_flight))

    def explain(self, request_id: str) -> None:
        """Those with this request in flight were its fault, and say nothing of others."""
        kept = [loss for loss in self._latest if request_id not in loss[1]]
        self._latest = deque(kept, maxlen=_MAX_REMEMBERED)

    def is_storm(self, now_ns: int, request_id: str) -> bool:
        """Whether some executor was lost lately while this request was not in flight."""
        return any(
            now_ns - lost_ns < STORM_NS and request_id not in in_flight
            for lost_ns, in_flight in self._latest
        )
