"""How many tokens of nobody are verified: each takes its time, and all others wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from scheduler_service.callers.refusals import too_many_strangers
from scheduler_service.callers.usage_bucket import UsageBucket

# One takes 0.1 to 0.3 ms; so all of them take at most 6 % of the time.
MAX_AT_ONCE = 200
_PER_MINUTE = 60.0 * MAX_AT_ONCE
# The bucket would let a minute's worth come at once.
_LESS = MAX_AT_ONCE - _PER_MINUTE
# All of the budget is back by then.
_RETRY_DELAY_S = 1.0


class StrangerBudget:
    """Counts tokens that turned out to be nobody's: so many may come at once, and each second."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._refused = UsageBucket()

    def check(self) -> None:
        """Raises DomainError(QUOTA_EXCEEDED) while there were too many."""
        if self._refused.delay_s(_PER_MINUTE, self._now_ns(), debt=_LESS) > 0:
            raise too_many_strangers(_RETRY_DELAY_S)

    def count(self) -> None:
        """One more was nobody's."""
        self._refused.use(1.0, _PER_MINUTE, self._now_ns())
