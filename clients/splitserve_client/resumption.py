"""Retries after a stream broke: backoff and limits."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from splitserve_client.errors import DeadlineExceeded, SplitserveError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Backoff between attempts: delays grow by `factor` up to a maximum, with jitter.

    `give_up_after_s` counts from the loss of the stream; any progress resets the count.
    """

    first_delay_s: float = 0.1
    factor: float = 2.0
    max_delay_s: float = 1.0
    give_up_after_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Clock, sleep and jitter, replaced by tests. `clock` returns monotonic seconds."""

    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    jitter: Callable[[], float] = random.random


class Backoff:
    """Backoff of one request or session."""

    def __init__(self, policy: RetryPolicy, timing: Timing, deadline: float | None = None) -> None:
        self._policy = policy
        self._timing = timing
        self._deadline = deadline
        self._lost_at: float | None = None
        self._delay_s = policy.first_delay_s

    def reset(self) -> None:
        """Resets the backoff after progress."""
        self._lost_at = None
        self._delay_s = self._policy.first_delay_s

    def remaining_s(self) -> float | None:
        """Returns the seconds until the deadline, None without one.

        Raises DeadlineExceeded after it.
        """
        if self._deadline is None:
            return None
        remaining_s = self._deadline - self._timing.clock()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline of the request has passed")
        return remaining_s

    async def pause(self, error: SplitserveError) -> None:
        """Waits before the next attempt.

        Raises `error` if the retry policy permits no more attempts.
        """
        delay_s = self.next_delay_s(error)
        if not self.lasts(delay_s):
            raise error
        remaining_s = self.remaining_s()
        if remaining_s is not None:
            delay_s = min(delay_s, remaining_s)
        await self._timing.sleep(delay_s)

    def next_delay_s(self, error: SplitserveError) -> float:
        """Returns the delay after `error` in seconds, and increases the next delay."""
        delay_s = self._delay_s * (0.5 + 0.5 * self._timing.jitter())
        self._delay_s = min(self._delay_s * self._policy.factor, self._policy.max_delay_s)
        return max(delay_s, error.retry_delay_s or 0.0)

    def lasts(self, delay_s: float) -> bool:
        """Returns whether the retry policy permits a further delay of `delay_s`.

        Counts from the first failure since the last progress.
        """
        now = self._timing.clock()
        if self._lost_at is None:
            self._lost_at = now
        return now + delay_s - self._lost_at <= self._policy.give_up_after_s
