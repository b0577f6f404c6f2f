"""Losses of executors: the evidence against single requests, and the recent losses of the fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum

# Time for which a loss is evidence that executors are lost for other reasons than one request.
STORM_NS = 600 * 10**9
_MAX_REMEMBERED = 64
# Time for which a lost executor may be on its way back.
RETURN_NS = 60 * 10**9
# Number of repeated losses of one life, which came back and answered nothing, that are not counted
# against a request.
MAX_REPEATS = 4
# Tokens after which the first loss of a request is forgiven; doubles with each further loss.
FORGIVING_TOKENS = 16
# Losses alone that fail a request during a storm: while executors are lost for other reasons, too,
# or perhaps only their network is.
NUM_ALONE_IN_A_STORM = 3


class LossCause(Enum):
    """Causes of an executor's loss, which decide whether it accuses the requests of its steps.

    DIED: the executor is gone, or breaks the contract. SILENT: it does not answer; it may hang, be
    slow, or be out of reach. BLAMELESS: it was asked to leave, or the fault is ours. WITHDRAWN: it
    is connected, but its results were wrong (`circuit_breaker.py`), which does not accuse its
    requests.
    """

    DIED = "died"
    SILENT = "silent"
    BLAMELESS = "blameless"
    WITHDRAWN = "withdrawn"

    @property
    def says_nothing(self) -> bool:
        """Whether the loss accuses no request."""
        return self in (LossCause.BLAMELESS, LossCause.WITHDRAWN)


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of one executor.

    `life`: life of the executor; the same life may come back. `has_answered`: whether the executor
    answered a step since it (re)joined. `num_living`: executors that took requests before the loss,
    this one included. `in_flight`: ids of the requests computed by its `num_steps` steps in flight,
    even of requests that had left the executor.
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
    """Losses of executors while a step of one request was in flight.

    `in_succession`: numbers of the losses since the latest forgiveness, which takes enough tokens
    between two losses; `num_alone` of these happened with nothing else in flight. `num_trials`:
    trials asked of the request when it was isolated last; 0 if it never was. `num_tokens`: output
    tokens of its longest sequence at the latest loss, of which it gained `num_gained` since the
    loss before. `lives`: executor lives of these losses. `any_silent`: some of these executors may
    still be there.
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
        """Returns whether a known executor life is lost again without having answered a step.

        Such an executor may be slow or far away. After MAX_REPEATS repeats in a row the loss
        counts, since no other evidence is left. Mutates the count of repeats.
        """
        if loss.has_answered or loss.life not in self.lives:
            self._num_repeats = 0
            return False
        self._num_repeats += 1
        return self._num_repeats <= MAX_REPEATS

    def num_alone_allowed(self, *, is_storm: bool) -> int:
        """Returns how many losses alone may be chance; grows with the number of trials."""
        least = NUM_ALONE_IN_A_STORM - 1 if is_storm else 0
        return least + (max(0, self.num_trials - 1) // FORGIVING_TOKENS).bit_length()

    def add(self, number: int, loss: Loss, num_tokens: int, *, is_alone: bool) -> None:
        """Adds loss `number`, at which the request has `num_tokens` output tokens."""
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
        """Drops losses of these numbers, for which another request is to blame."""
        self.in_succession = [number for number in self.in_succession if number not in numbers]


@dataclass(slots=True)
class FleetLosses:
    """Latest losses of all executors: their times, and the requests in flight.

    `num_losses`: losses so far, which is the number of the latest loss.
    """

    num_losses: int = 0
    _latest: deque[tuple[int, frozenset[str]]] = field(
        default_factory=lambda: deque(maxlen=_MAX_REMEMBERED)
    )
    # Times of losses in ns, each with the number of executors living before the loss.
    _num_living: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=_MAX_REMEMBERED)
    )
    # Times in ns at which requests were failed for losses, latest first.
    _failed_ns: tuple[int, ...] = ()

    def add(self, loss: Loss, in_flight: frozenset[str]) -> None:
        """Adds a loss with the ids of its requests in flight."""
        self.num_losses += 1
        self._latest.append((loss.now_ns, in_flight))
        self._num_living.append((loss.now_ns, loss.num_living))

    def explain(self, request_id: str, now_ns: int) -> bool:
        """Blames a request for all losses with it in flight; these accuse no other request.

        Returns whether that explains all losses within STORM_NS, and no other request was failed
        within that time.
        """
        kept = [each for each in self._latest if request_id not in each[1]]
        self._latest = deque(kept, maxlen=_MAX_REMEMBERED)
        is_first = not self.is_proven(now_ns)
        self._failed_ns = (now_ns, *self._failed_ns[:1])
        return is_first and not any(now_ns - lost_ns < STORM_NS for lost_ns, _ in kept)

    def is_proven(self, now_ns: int) -> bool:
        """Returns whether a request was failed within STORM_NS: more of its kind may follow."""
        return any(now_ns - failed_ns < STORM_NS for failed_ns in self._failed_ns)

    def is_storm(self, now_ns: int, request_id: str, suspects: Collection[str] = ()) -> bool:
        """Returns whether an executor was lost within STORM_NS for other reasons.

        Neither this request nor any of `suspects` was in flight at such a loss.
        """
        return any(
            now_ns - lost_ns < STORM_NS
            and request_id not in in_flight
            and in_flight.isdisjoint(suspects)
            for lost_ns, in_flight in self._latest
        )

    def return_expected_until_ns(self, now_ns: int) -> int:
        """Returns the time in ns until which a lost executor of several may return; 0 for none."""
        times = [at_ns for at_ns, num_living in self._num_living if num_living > 1]
        until_ns = max(times, default=-RETURN_NS) + RETURN_NS
        return until_ns if until_ns > now_ns else 0
