"""Circuit breaker of each executor, driven by failures of its steps and rows.

A failed step or row may be the fault of the executor or of a request. The later fate of the request
decides: if the request gets a token after all, mostly on another executor, the executor is blamed
for the failure; if the request ends with an error, the request is. Breakers are kept per executor
life (one process lifetime), so a restarted executor begins with a new breaker. Pure: callers pass
the time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

# Blame (failures laid on an executor) at which its breaker opens. Each step that brings a token
# takes off `_RELIEF`, so an executor that fails one step in ten or more is found.
MAX_BLAME = 3.0
_RELIEF = 0.1
# Number of requests that fail in a row, without a token in between, after which the executor is
# probed at once.
MAX_FAILURES_IN_A_ROW = 3
# Number of executors on which a request may fail; it is not tried on another one after that.
MAX_EXECUTORS_PER_REQUEST = 4
FIRST_PROBE_NS = 10**9
LAST_PROBE_NS = 60 * 10**9
# A breaker that opens again within this time continues the exponential backoff of its probes.
_REMEMBERED_NS = 600 * 10**9
_MAX_STEPS = 64
_MAX_LIVES = 4096

Life = Hashable


@dataclass(slots=True)
class _FailedStep:
    """Requests of a failed step; `awaited`: requests of it that got no token since."""

    request_ids: frozenset[str]
    awaited: set[str]


@dataclass(slots=True)
class _Breaker:
    """Circuit breaker of one executor life.

    `num_probes`: failed probes, by which the backoff grows. `closed_ns`: time of the latest close;
    None if the breaker never closed. `blamed_for`: requests of the steps that `blame` counts. A
    step adds to `blame` only if it has a request that is not blamed yet, so a request that fails
    every other step of a healthy executor does not open its breaker. `failed_in_a_row`: requests
    that failed since the executor last brought a token, at most MAX_FAILURES_IN_A_ROW.
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
        """Whether the breaker has no failures, so that a healthy step would change nothing."""
        return not (self.blame or self.failed_in_a_row or self.steps)

    def relieve(self) -> None:
        """Lowers the blame by `_RELIEF`, after a step that brought a token."""
        self.failed_in_a_row.clear()
        self.blame = max(0.0, self.blame - _RELIEF)
        if not self.blame:
            self.blamed_for.clear()

    def settle(self, request_id: str, *, is_innocent: bool) -> None:
        """Settles the failed steps of a request that got a token (`is_innocent`) or ended.

        The executor is blamed for a failed step once all requests of the step have got a token. A
        step of a request that ended is dropped: its failure proves nothing.
        """
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
    """Circuit breakers of all executors.

    An executor with an open breaker gets probes and no requests.
    """

    def __init__(self) -> None:
        self._breakers: OrderedDict[Life, _Breaker] = OrderedDict()
        # Request id to executor lives on which the request failed since its latest token.
        self._failed_at: dict[str, set[Life]] = {}

    # -- queries -------------------------------------------------------------------------------

    def is_quiet(self, life: Life) -> bool:
        """Returns whether a step of `life` in which every row succeeded need not be reported."""
        breaker = self._breakers.get(life)
        return not self._failed_at and (breaker is None or breaker.is_quiet)

    def is_open(self, life: Life) -> bool:
        """Returns whether the breaker is open: whether the executor is withdrawn."""
        breaker = self._breakers.get(life)
        return breaker is not None and breaker.is_open

    def failed_at(self, request_id: str) -> Collection[Life]:
        """Returns the executor lives on which the request failed since its latest token."""
        return self._failed_at.get(request_id, ())

    @property
    def to_open(self) -> list[Life]:
        """Executor lives whose breakers are closed and whose blame reached MAX_BLAME."""
        return [
            life
            for life, breaker in self._breakers.items()
            if breaker.blame >= MAX_BLAME and not breaker.is_open
        ]

    def is_suspected(self, life: Life) -> bool:
        """Returns whether the executor fails every request and should be probed.

        False once the breaker is open.
        """
        breaker = self._breakers.get(life)
        return (
            breaker is not None
            and not breaker.is_open
            and len(breaker.failed_in_a_row) >= MAX_FAILURES_IN_A_ROW
        )

    @property
    def suspected(self) -> list[Life]:
        """Executor lives that fail every request and should be probed."""
        return [life for life in self._breakers if self.is_suspected(life)]

    @property
    def opened(self) -> list[Life]:
        """Executor lives whose breakers are open."""
        return [life for life, breaker in self._breakers.items() if breaker.is_open]

    def probe_at_ns(self, life: Life) -> int:
        """Returns the earliest time of the next probe of the executor, in ns."""
        return self._of(life).probe_at_ns

    # -- reported outcomes ---------------------------------------------------------------------

    def failed(self, life: Life, request_ids: Collection[str]) -> None:
        """Notes requests that failed together on an executor: a whole step, or rows of a step."""
        breaker = self._of(life)
        breaker.steps.append(_FailedStep(frozenset(request_ids), set(request_ids)))
        for request_id in request_ids:
            self._failed_at.setdefault(request_id, set()).add(life)
            if len(breaker.failed_in_a_row) < MAX_FAILURES_IN_A_ROW:
                breaker.failed_in_a_row.add(request_id)

    def succeeded(self, life: Life, request_ids: Collection[str]) -> None:
        """Notes requests that got tokens in a step of an executor."""
        breaker = self._breakers.get(life)
        if breaker is not None:
            breaker.relieve()
        for request_id in request_ids:
            self._settle(request_id, is_innocent=True)

    def ended(self, request_id: str) -> None:
        """Notes that a request ended without another token: failures of its steps prove nothing."""
        self._settle(request_id, is_innocent=False)

    def _settle(self, request_id: str, *, is_innocent: bool) -> None:
        for life in self._failed_at.pop(request_id, ()):
            if (breaker := self._breakers.get(life)) is not None:
                breaker.settle(request_id, is_innocent=is_innocent)

    # -- opening, probing and closing ----------------------------------------------------------

    def open(self, life: Life, now_ns: int) -> None:
        """Opens the breaker and schedules a probe: withdraws the executor until one succeeds."""
        breaker = self._of(life)
        closed_ns = breaker.closed_ns
        is_again = closed_ns is not None and now_ns - closed_ns < _REMEMBERED_NS
        breaker.num_probes = breaker.num_probes + 1 if is_again else 0
        breaker.is_open = True
        breaker.forgive()
        breaker.probe_at_ns = now_ns + _delay_ns(breaker.num_probes)

    def probe_failed(self, life: Life, now_ns: int) -> None:
        """Doubles the delay before the next probe, up to LAST_PROBE_NS."""
        breaker = self._of(life)
        breaker.num_probes += 1
        breaker.probe_at_ns = now_ns + _delay_ns(breaker.num_probes)

    def probe_passed(self, life: Life, now_ns: int) -> None:
        """Closes the breaker and forgets all failures."""
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
