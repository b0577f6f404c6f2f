"""All schedulers that the gateway stands in front of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from typing import Self

from splitserve_client import ClientConfig, Model, UnreadBudget
from splitserve_gateway.http.errors import caller_not_allowed, model_unknown, no_scheduler
from splitserve_gateway.upstreams.upstream import Served, Upstream


class Fleet:
    """Use it as `async with Fleet(addresses) as fleet`."""

    def __init__(
        self,
        addresses: Sequence[str],
        unread: UnreadBudget,
        config: ClientConfig | None = None,
    ) -> None:
        self.unread = unread
        self._upstreams = [
            Upstream(address, config, unread, self._find_other) for address in addresses
        ]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for upstream in self._upstreams:
            await self._stack.enter_async_context(upstream)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def num_session_requests(self) -> int:
        """Requests that schedulers may still have."""
        return sum(upstream.num_session_requests for upstream in self._upstreams)

    def reachable(self, allowed: Collection[Upstream] | None = None) -> list[Upstream]:
        """Schedulers that serve something now; `allowed`: of these, None: of all."""
        return [
            upstream
            for upstream in self._upstreams
            if upstream.served is not None and (allowed is None or upstream in allowed)
        ]

    def models(self, allowed: Collection[Upstream] | None = None) -> list[Model]:
        """What is served now, each name once; `allowed`: by these, None: by any."""
        served = [upstream.served.model for upstream in self.reachable(allowed) if upstream.served]
        return list({model.name: model for model in served}.values())

    @property
    def is_ready(self) -> bool:
        """Whether some scheduler takes requests."""
        return any(upstream.served and upstream.takes_requests for upstream in self._upstreams)

    @property
    def readiness(self) -> list[str]:
        """What is known of each scheduler, by one word."""
        return [upstream.readiness for upstream in self._upstreams]

    def choose(
        self, model: str | None, allowed: Collection[Upstream] | None = None
    ) -> tuple[Upstream, Served]:
        """The least busy scheduler that serves `model`; None: any. Raises ApiError.

        `allowed`: of these, None: of all.
        """
        known = [(u, u.served) for u in self.reachable(allowed) if u.served is not None]
        if not known and allowed is not None and not allowed:
            raise caller_not_allowed("the credential is for none of the models that are served")
        if not known:
            raise no_scheduler()
        fitting = [(u, s) for u, s in known if model in (None, s.model.name)]
        if not fitting:
            raise model_unknown(str(model), [s.model.name for _, s in known])
        # One that takes none now may soon: it is lost, or its executor is. Any other is better.
        return min(fitting, key=lambda pair: (not pair[0].takes_requests, pair[0].num_open))

    def _find_other(self, lost: Upstream, digest: str) -> Upstream | None:
        """Another that takes requests for the model with this digest."""
        fitting = [
            upstream
            for upstream in self._upstreams
            if upstream is not lost
            and upstream.takes_requests
            and upstream.served is not None
            and upstream.served.model.digest == digest
        ]
        return min(fitting, key=lambda upstream: upstream.num_open, default=None)
