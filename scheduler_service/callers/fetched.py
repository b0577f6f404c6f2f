"""A value that is fetched now and then, and at once if something in it was missed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")
# Issuers announce keys long before they sign with them.
PERIOD_S = 300.0
# Whoever sends tokens of unknown keys makes us ask the issuer no more often than that.
LEAST_PAUSE_S = 10.0


class CannotFetch(Exception):
    """The message says from where, and why; one line."""


class Fetched(Generic[T]):
    """`value`: what `fetch` brought last; it raises CannotFetch. Implements `Refreshed`."""

    def __init__(
        self, initial: T, fetch: Callable[[], T], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.value = initial
        self._fetch = fetch
        self._now_s = now_s
        self._tried_at: float | None = None
        self._is_wanted = True
        self._problem = ""

    def want(self) -> None:
        """Something was looked for in the value, and was not there."""
        self._is_wanted = True

    def refresh(self) -> bool:
        if not self._is_due():
            return False
        self._tried_at, self._is_wanted = self._now_s(), False
        try:
            value = self._fetch()
        except CannotFetch as error:
            self._is_wanted = True
            if str(error) != self._problem:
                _log.warning("token_keys_unavailable problem=%r", str(error))
            self._problem = str(error)
            return False
        self._problem = ""
        if value == self.value:
            return False
        self.value = value
        return True

    def _is_due(self) -> bool:
        if self._tried_at is None:
            return True
        pause_s = self._now_s() - self._tried_at
        return pause_s >= (LEAST_PAUSE_S if self._is_wanted else PERIOD_S)
