"""All schedulers that the gateway stands in front of."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Self

from splitserve_client import ClientConfig, Model, SplitserveError, UnreadBudget
from splitserve_gateway.http.errors import caller_not_allowed, model_unknown, no_scheduler
from splitserve_gateway.upstreams.upstream import Served, Upstream
from splitserve_rpc.discovery import Discovery

# How often it asks which schedulers there are.
_LOOK_S = 1.0
# How long a request waits for what a scheduler serves to be read.
_READING_S = 10.0
# How long after a scheduler was lost its executors are expected at one that has none.
_MOVING_S = 10.0

_log = logging.getLogger(__name__)


class Fleet:
    """Use it as `async with Fleet(discovery) as fleet`."""

    def __init__(
        self,
        schedulers: Discovery,
        unread: UnreadBudget,
        config: ClientConfig | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw`: a number from 0 to 1; orders schedulers that were never chosen."""
        self.unread = unread
        self._schedulers = schedulers
        config = config or ClientConfig()
        # What callers show us goes to schedulers that we were told of, not to whom these name.
        self._config = replace(
            config, tls_name=schedulers.host or config.tls_name, follows_peers=False
        )
        self._upstreams: list[Upstream] = []
        self._draw = draw
        # Number of the choice that each was given last. Never chosen: drawn, below 1.
        self._turns: dict[Upstream, float] = {}
        self._next_turn = itertools.count(1)
        # Of schedulers that are not named any more: what they have begun goes on.
        self._retired: list[Upstream] = []
        # Of those that could not be taken: why, as it is in the log.
        self._unusable: dict[str, str] = {}
        self._watcher: asyncio.Task[None] | None = None
        # When schedulers that served a model were lost the last time, by its name.
        self._lost_s: dict[str, float] = {}
        # Set, and another in its place, when something is known anew of a scheduler.
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._renew()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watcher is not None, "entered"
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        for upstream in (*self._retired, *self._upstreams):
            await _leave(upstream)

    @property
    def num_session_requests(self) -> int:
        """Requests that schedulers may still have."""
        known = (*self._retired, *self._upstreams)
        return sum(upstream.num_session_requests for upstream in known)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._renew()

    async def _renew(self) -> None:
        """Comes to know the schedulers that there are by now."""
        with suppress(OSError):  # it is in the log; those that are known stay
            addresses = await self._schedulers.addresses()
            gone = [upstream for upstream in self._upstreams if upstream.address not in addresses]
            known = {upstream.address for upstream in self._upstreams}
            self._upstreams = [upstream for upstream in self._upstreams if upstream not in gone]
            self._retired += gone
            for upstream in gone:
                upstream.is_named = False
            self._unusable = {
                each: why for each, why in self._unusable.items() if each in addresses
            }
            for address in addresses:
                if address not in known:
                    await self._join(address)
        for upstream in [retired for retired in self._retired if not retired.num_session_requests]:
            self._retired.remove(upstream)
            del self._turns[upstream]
            if upstream.served is not None:
                self.tell_lost(upstream.served)
            await _leave(upstream)

    async def _join(self, address: str) -> None:
        """If it cannot be now, it is tried again; the others are not to suffer from it."""
        try:
            upstream = Upstream(address, self._config, self.unread, self)
            await upstream.__aenter__()
            self._turns[upstream] = self._draw()
            self._upstreams.append(upstream)
            self._unusable.pop(address, None)
        except SplitserveError as error:
            if self._unusable.get(address) != str(error):
                self._unusable[address] = str(error)
                _log.error("upstream_unusable address=%s error=%r", address, str(error))

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

    async def wait_read(
        self, model: str | None, allowed: Collection[Upstream] | None = None
    ) -> None:
        """Waits for a while if nobody is known to serve `model`, and it is read what some serve.

        `model`, `allowed`: as of `choose`.
        """
        if self._is_served(model, allowed):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_READING_S):
                for upstream in [each for each in self._upstreams if each.is_reading]:
                    await upstream.wait_read()
                while not self._is_served(model, allowed) and self._is_moving(model, allowed):
                    await self._news.wait()

    def choose(
        self, model: str | None, allowed: Collection[Upstream] | None = None
    ) -> tuple[Upstream, Served]:
        """The least busy scheduler that serves `model`; None: any. Raises ApiError.

        Equally busy ones take turns. `allowed`: of these, None: of all.
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
        chosen, served = min(
            fitting,
            key=lambda pair: (not pair[0].takes_requests, pair[0].num_open, self._turns[pair[0]]),
        )
        self._turns[chosen] = next(self._next_turn)
        chosen.reserve()
        return chosen, served

    def _is_served(self, model: str | None, allowed: Collection[Upstream] | None) -> bool:
        """Whether `choose` finds somebody."""
        names = [each.name for each in self.models(allowed)]
        return bool(names) if model is None else model in names

    def _is_moving(self, model: str | None, allowed: Collection[Upstream] | None) -> bool:
        """Whether `choose` may soon find somebody: executors go from one scheduler to another.

        One of `allowed` has none yet, and one that served `model` was lost, or is being left.
        """
        since_s = asyncio.get_running_loop().time() - _MOVING_S
        moving = {name for name, lost_s in self._lost_s.items() if lost_s > since_s}
        moving |= {each.served.model.name for each in self._retired if each.served is not None}
        can_come = any(
            upstream.will_serve and (allowed is None or upstream in allowed)
            for upstream in self._upstreams
        )
        return can_come and (bool(moving) if model is None else model in moving)

    def tell_lost(self, served: Served) -> None:
        """A scheduler that served this is gone."""
        now_s = asyncio.get_running_loop().time()
        # Names are what schedulers say: those that do not count any more are not kept.
        self._lost_s = {k: s for k, s in self._lost_s.items() if s > now_s - _MOVING_S}
        self._lost_s[served.model.name] = now_s

    def tell_news(self) -> None:
        """Something is known anew of a scheduler."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait_other(
        self, stopping: Upstream, digest: str, patience_s: float | None
    ) -> Upstream | None:
        """As `find_other`, once there is one; or `stopping` itself, if it has begun anew by then.

        None: none can be expected, or not within `patience_s`. The executors of a scheduler that is
        being stopped go to others when it has ended; until then those may have none.
        """
        most_s = self._config.retry.give_up_after_s
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s if patience_s is None else min(patience_s, most_s)):
                while (other := self._find(digest)) is None:
                    if not any(each.will_serve for each in self._upstreams if each is not stopping):
                        return None
                    await self._news.wait()
                return other
        return None

    def find_other(self, lost: Upstream, digest: str) -> Upstream | None:
        """Another that takes requests for the model with this digest."""
        return self._find(digest, without=lost)

    def _find(self, digest: str, without: Upstream | None = None) -> Upstream | None:
        fitting = [
            upstream
            for upstream in self._upstreams
            if upstream is not without
            and upstream.takes_requests
            and upstream.served is not None
            and upstream.served.model.digest == digest
        ]
        return min(fitting, key=lambda each: (each.num_open, self._turns[each]), default=None)


async def _leave(upstream: Upstream) -> None:
    """Whatever becomes of it, the others are left as well."""
    try:
        await upstream.__aexit__(None, None, None)
    except SplitserveError as error:
        _log.warning("upstream_not_closed address=%s error=%r", upstream.address, str(error))
