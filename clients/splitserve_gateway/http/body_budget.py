"""How many bytes of bodies all requests together may have here."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from splitserve_gateway.http.errors import ApiError

# Of each body so much is not counted: small ones pass whatever large ones have taken.
FREE_BYTES = 64 * 1024
_PATIENCE_S = 5.0
_RETRY_AFTER_S = 2.0


class BodyBudget:
    """The bytes of bodies that are being read, or not yet token ids. `num_bytes`: now."""

    def __init__(self, max_bytes: int, patience_s: float = _PATIENCE_S) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._has_more = asyncio.Event()

    def share(self) -> BodyShare:
        """What one body takes of it; use it in a `with`."""
        return BodyShare(self)

    async def take(self, num_bytes: int) -> None:
        """Waits a while for so many. Raises ApiError: 429."""
        try:
            async with asyncio.timeout(self._patience_s):
                while self.num_bytes + num_bytes > self._max_bytes:
                    self._has_more.clear()
                    await self._has_more.wait()
        except TimeoutError as error:
            message = f"the bodies of requests have more than {self._max_bytes} bytes together"
            code = "too_many_body_bytes"
            raise ApiError(
                429, "rate_limit_error", message, code=code, retry_after_s=_RETRY_AFTER_S
            ) from error
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Whoever waits may go on."""
        self.num_bytes -= num_bytes
        self._has_more.set()


class BodyShare:
    """What one body has of the budget; gives it back at the end of the `with`."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._budget.give_back(self._num_bytes)

    async def grow(self, num_body_bytes: int) -> None:
        """The body has so many bytes by now. Waits a while for room. Raises ApiError: 429."""
        num_more = num_body_bytes - FREE_BYTES - self._num_bytes
        if num_more > 0:
            await self._budget.take(num_more)
            self._num_bytes += num_more
