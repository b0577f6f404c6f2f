"""How many bytes of bodies all requests together may have here."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from splitserve_gateway.http.errors import ApiError
from splitserve_gateway.sharing.shares import Shares

# Of each body so much is not counted: small ones pass whatever large ones have taken.
FREE_BYTES = 64 * 1024
_PATIENCE_S = 5.0
_RETRY_AFTER_S = 2.0


class BodyBudget:
    """The bytes of bodies that are being read, or not yet token ids.

    Where callers are known, each tenant leaves some to others.
    """

    def __init__(self, max_bytes: int, patience_s: float = _PATIENCE_S) -> None:
        self._shares = Shares(max_bytes)
        self._patience_s = patience_s
        self._has_more = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """What all have now."""
        return self._shares.num_held

    def share(self, tenant: str | None) -> BodyShare:
        """What one body takes of it; use it in a `with`. `tenant`: None if none is known."""
        return BodyShare(self, tenant)

    async def take(self, tenant: str | None, num_bytes: int) -> None:
        """Waits a while for so many. Raises ApiError: 429."""
        try:
            async with asyncio.timeout(self._patience_s):
                while not self._shares.may_take(tenant, num_bytes):
                    self._has_more.clear()
                    await self._has_more.wait()
        except TimeoutError as error:
            message = f"the bodies of requests have too many of {self._shares.num_all} bytes"
            code = "too_many_body_bytes"
            raise ApiError(
                429, "rate_limit_error", message, code=code, retry_after_s=_RETRY_AFTER_S
            ) from error
        self._shares.take(tenant, num_bytes)

    def give_back(self, tenant: str | None, num_bytes: int) -> None:
        """Whoever waits may go on."""
        self._shares.give_back(tenant, num_bytes)
        self._has_more.set()


class BodyShare:
    """What one body has of the budget; gives it back at the end of the `with`."""

    def __init__(self, budget: BodyBudget, tenant: str | None) -> None:
        self._budget = budget
        self._tenant = tenant
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._num_bytes:
            self._budget.give_back(self._tenant, self._num_bytes)

    async def grow(self, num_body_bytes: int) -> None:
        """The body has so many bytes by now. Waits a while for room. Raises ApiError: 429."""
        num_more = num_body_bytes - FREE_BYTES - self._num_bytes
        if num_more > 0:
            await self._budget.take(self._tenant, num_more)
            self._num_bytes += num_more
