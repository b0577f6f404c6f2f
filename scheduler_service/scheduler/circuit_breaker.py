"""Circuit breaker of each executor, judged by what it answers, against what others answer.

A failed step or row may be the fault of the executor or of a request. What becomes of the request
decides: if it gets a token after all, mostly on another executor, the failure is laid on the
executor; if it ends with an error, on the request. Executors are named by their lives, so a restart
begins anew. Pure: time is what callers say it is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

# Failures laid on an executor, after which its breaker opens; each step that brings a token takes
# off a part of one. So an executor that fails one step in ten or more is found.
MAX_BLAME = 3.0
_RELIEF = 0.1
# Requests that failed in a row, with no token in between: then the executor is probed at once.
MAX_FAILURES_IN_A_ROW = 3
# A request that failed on so many executors is not tried on another one.
MAX_EXECUTORS_PER_REQUEST = 4
FIRST_PROBE_NS = 10**9
LAST_PROBE_NS = 60 * 10**9
# A breaker that opens again so soon waits as long as it did last, and twice that.
_REMEMBERED_NS = 600 * 10**9
_MAX_STEPS = 64
_MAX_LIVES = 4096

Life = Hashable


@dataclass(slots=True)
class _FailedStep:
    """Requests of a failed step; `awaited`: those that got no token since."""

    request_ids: frozenset[str]
    awaited: set[str]


@dataclass(slots=True)
class _Breaker:
    """Of one life. `num_probes`: since it opened, those failed. `closed_ns`: None if it never did.

    `blamed_for`: requests of the steps that `blame` counts, each of which adds to it once: one
    that fails every other step of a healthy executor does not open its breaker. `failed_in_a_row`:
    requests that failed since the executor last brought a token, a few of them.
    """

    blame: float = 0.0
    blamed_for: set[str] = field(default_factory=set)
    failed_in_a_row: set[str] = field(default_factory=set)
    steps: deque[_FailedStep] = field(default_factory=lambda: deque(maxlen=_MAX_STEPS))
    is_open: bool = False
    num_probes: int = 0
    closed_ns: int | None = None
    probe_at_ns: int = 0

    @property
    def is_quiet(self) -> bool:
        """Returns whether a step without failures would change nothing."""
        return not (self.blame or self.failed_in_a_row or self.steps)

    def relieve(self) -> None:
        """Takes off a part of the blame, after a step that brought a token."""
        self.failed_in_a_row.clear()
        self.blame = max(0.0, self.blame - _RELIEF)
        if not self.blame:
            self.blamed_for.clear()

    def settle(self, request_id: str, *, is_innocent: bool) -> None:
        """Lays failed steps on the executor once all of their requests have got a token."""
        for step in [step for step in self.steps if request_id in step.request_ids]:
            step.awaited.discard(request_id)
            if is_innocent and step.awaited:
                continue
            self.steps.remove(step)
            if is_innocent:
                self.blame += not step.request_ids <= self.blamed_for
                self.blamed_for |= step.request_ids

    def forgive(self) -> None:
        """Forgets all failures."""
        self.blame = 0.0
        self.blamed_for.clear()
        self.failed_in_a_row.clear()
        self.steps.clear()


class CircuitBreakers:
    """The breakers of all executors. An open breaker: the executor gets probes, and no requests."""

    def __init__(self) -> None:
        self._breakers: OrderedDict[Life, _Breaker] = OrderedDict()
        # By request: where it failed since its latest token.
        self._failed_at: dict[str, set[Life]] = {}

    # -- what is known -------------------------------------------------------------------------

    def is_quiet(self, life: Life) -> bool:
        """Whether a step of `life` in which all rows did well need not be told."""
        breaker = self._breakers.get(life)
        return not self._failed_at and (breaker is None or breaker.is_quiet)

    def is_open(self, life: Life) -> bool:
        """Whether the executor is withdrawn."""
        breaker = self._breakers.get(life)
        return breaker is not None and breaker.is_open

    def failed_at(self, request_id: str) -> Collection[Life]:
        """Executors where the request failed since its latest token."""
        return self._failed_at.get(request_id, ())

    @property
    def to_open(self) -> list[Life]:
        """Executors on which enough failures were laid, and whose breakers are closed."""
        return [
            life
            for life, breaker in self._breakers.items()
            if breaker.blame >= MAX_BLAME and not breaker.is_open
        ]

    def is_suspected(self, life: Life) -> bool:
        """Whether the executor fails whatever it is given, and should be probed."""
        breaker = self._breakers.get(life)
        return (
            breaker is not None
            and not breaker.is_open
            and len(breaker.failed_in_a_row) >= MAX_FAILURES_IN_A_ROW
        )

    @property
    def suspected(self) -> list[Life]:
        """Executors that fail whatever they are given, and should be probed."""
        return [life for life in self._breakers if self.is_suspected(life)]

    @property
    def opened(self) -> list[Life]:
        """Executors whose breakers are open."""
        return [life for life, breaker in self._breakers.items() if breaker.is_open]

    def probe_at_ns(self, life: Life) -> int:
        """When the executor may be probed next."""
        return self._of(life).probe_at_ns

    # -- what happens --------------------------------------------------------------------------

    def failed(self, life: Life, request_ids: Collection[str]) -> None:
        """These requests failed together: a whole step, or rows of a step."""
        breaker = self._of(life)
        breaker.steps.append(_FailedStep(frozenset(request_ids), set(request_ids)))
        for request_id in request_ids:
            self._failed_at.setdefault(request_id, set()).add(life)
            if len(breaker.failed_in_a_row) < MAX_FAILURES_IN_A_ROW:
                breaker.failed_in_a_row.add(request_id)

    def succeeded(self, life: Life, request_ids: Collection[str]) -> None:
        """These requests got tokens in a step of this executor."""
        breaker = self._breakers.get(life)
        if breaker is not None:
            breaker.relieve()
        for request_id in request_ids:
            self._settle(request_id, is_innocent=True)

    def ended(self, request_id: str) -> None:
        """A request has ended without another token: failures that it shares prove nothing."""
        self._settle(request_id, is_innocent=False)

    def _settle(self, request_id: str, *, is_innocent: bool) -> None:
        for life in self._failed_at.pop(request_id, ()):
            if (breaker := self._breakers.get(life)) is not None:
                breaker.settle(request_id, is_innocent=is_innocent)

    # -- open and closed -----------------------------------------------------------------------

    def open(self, life: Life, now_ns: int) -> None:
        """Withdraws the executor; `probe_at_ns` says when it is tried again."""
        breaker = self._of(life)
        closed_ns = breaker.closed_ns
        is_again = closed_ns is not None and now_ns - closed_ns < _REMEMBERED_NS
        breaker.num_probes = breaker.num_probes + 1 if is_again else 0
        breaker.is_open = True
        breaker.forgive()
        breaker.probe_at_ns = now_ns + _delay_ns(breaker.num_probes)

    def probe_failed(self, life: Life, now_ns: int) -> None:
        """Waits twice as long before the next probe."""
        breaker = self._of(life)
        breaker.num_probes += 1
        breaker.probe_at_ns = now_ns + _delay_ns(breaker.num_probes)

    def probe_passed(self, life: Life, now_ns: int) -> None:
        """Closes the breaker."""
        breaker = self._of(life)
        if breaker.is_open:
            breaker.is_open, breaker.closed_ns = False, now_ns
        breaker.forgive()
        breaker.probe_at_ns = now_ns + FIRST_PROBE_NS

    def _of(self, life: Life) -> _Breaker:
        breaker = self._breakers.get(life)
        if breaker is None:
            breaker = self._breakers[life] = _Breaker()
            while len(self._breakers) > _MAX_LIVES:
                self._breakers.popitem(last=False)
        return breaker


def _delay_ns(num_probes: int) -> int:
    return int(min(FIRST_PROBE_NS << min(num_probes, 16), LAST_PROBE_NS))
