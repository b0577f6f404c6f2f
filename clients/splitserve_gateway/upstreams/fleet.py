"""Fleet of schedulers behind the gateway: discovery, choice for a request, and failover."""

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
from splitserve_common import Discovery
from splitserve_gateway.http import caller_not_allowed, model_unknown, no_scheduler
from splitserve_gateway.upstreams.adapter_lists import Listed
from splitserve_gateway.upstreams.upstream import ChatRules, ServedByScheduler, Upstream

# Interval of discovery.
_LOOK_S = 1.0
# Longest wait of a request until the models of schedulers are read.
_READING_S = 10.0
# Time after the loss of a scheduler in which its executors are expected at another scheduler.
_MOVING_S = 10.0

_log = logging.getLogger(__name__)


class Fleet:
    """Schedulers of the gateway. Use as `async with Fleet(discovery) as fleet`."""

    def __init__(
        self,
        schedulers: Discovery,
        unread: UnreadBudget,
        config: ClientConfig | None = None,
        draw: Callable[[], float] = random.random,
        chats: ChatRules | None = None,
    ) -> None:
        """Prepares the fleet without connecting.

        `draw`: returns a number from 0 to 1; orders schedulers that were never chosen.
        """
        self.unread = unread
        self._chats = chats
        self._schedulers = schedulers
        config = config or ClientConfig()
        # Callers' credentials go only to configured schedulers, not to peers that these name.
        self._config = replace(
            config, tls_name=schedulers.host or config.tls_name, follows_peers=False
        )
        self._upstreams: list[Upstream] = []
        self._draw = draw
        # Number of the last choice of each scheduler. Never chosen: a drawn number below 1.
        self._turns: dict[Upstream, float] = {}
        self._next_turn = itertools.count(1)
        # Schedulers that discovery no longer names; their running requests go on.
        self._retired: list[Upstream] = []
        # Logged error of each address that could not be joined.
        self._unusable: dict[str, str] = {}
        self._watcher: asyncio.Task[None] | None = None
        # Time of the last loss of a scheduler, by the name of its model.
        self._lost_s: dict[str, float] = {}
        # Set and replaced by a new event when the state of a scheduler changes.
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
        """Number of requests that schedulers may still have."""
        known = (*self._retired, *self._upstreams)
        return sum(upstream.num_session_requests for upstream in known)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._renew()

    async def _renew(self) -> None:
        """Joins newly discovered schedulers; retires those that discovery no longer names."""
        with suppress(OSError):  # logged by discovery; known schedulers stay
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
        """Connects to the scheduler at `address`.

        A failure is logged and retried with the next discovery; other schedulers are not affected.
        """
        try:
            upstream = Upstream(address, self._config, self.unread, self, self._chats)
            await upstream.__aenter__()
            self._turns[upstream] = self._draw()
            self._upstreams.append(upstream)
            self._unusable.pop(address, None)
        except SplitserveError as error:
            if self._unusable.get(address) != str(error):
                self._unusable[address] = str(error)
                _log.error("upstream_unusable address=%s error=%r", address, str(error))

    def reachable(self, allowed: Collection[Upstream] | None = None) -> list[Upstream]:
        """Returns the schedulers that serve a model now.

        `allowed`: restricts them; None for all.
        """
        return [
            upstream
            for upstream in self._upstreams
            if upstream.served is not None and (allowed is None or upstream in allowed)
        ]

    def models(self, allowed: Collection[Upstream] | None = None) -> list[Model]:
        """Returns the models served now, each name once.

        `allowed`: restricts schedulers; None for all.
        """
        served = [upstream.served.model for upstream in self.reachable(allowed) if upstream.served]
        return list({model.name: model for model in served}.values())

    async def adapters(
        self, allowed: Collection[Upstream] | None, credential: str, name: str | None = None
    ) -> dict[Upstream, Listed]:
        """Returns the adapters that each scheduler lists for the owner of `credential`.

        `allowed`: restricts schedulers; None for all. `name`: as of `AdapterLists.read`.
        """
        upstreams = self.reachable(allowed)
        lists = await asyncio.gather(*(each.adapters.read(credential, name) for each in upstreams))
        return dict(zip(upstreams, lists, strict=True))

    def forget_adapters(self) -> None:
        """Reads the adapters of all schedulers again when they are needed."""
        for upstream in self._upstreams:
            upstream.adapters.forget()

    @property
    def is_ready(self) -> bool:
        """Whether a scheduler takes requests."""
        return any(upstream.served and upstream.takes_requests for upstream in self._upstreams)

    @property
    def readiness(self) -> list[str]:
        """Readiness of each scheduler, as one word."""
        return [upstream.readiness for upstream in self._upstreams]

    async def wait_read(
        self, model: str | None, allowed: Collection[Upstream] | None = None
    ) -> None:
        """Waits until `choose` can succeed, if a scheduler's model is being read or executors move.

        Returns after a bounded time in any case. `model`, `allowed`: as of `choose`.
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
        self,
        model: str | None,
        allowed: Collection[Upstream] | None = None,
        *,
        prefers: Callable[[Model], bool] | None = None,
    ) -> tuple[Upstream, ServedByScheduler]:
        """Chooses the least busy scheduler that serves `model`, and reserves a place there.

        Equally busy schedulers take turns. `model`: None for any. `allowed`: restricts schedulers,
        None for all. `prefers`: whether a model suits a request with `model` None; None: all do.
        Raises ApiError.
        """
        known = [(u, u.served) for u in self.reachable(allowed) if u.served is not None]
        if not known and allowed is not None and not allowed:
            raise caller_not_allowed("the credential does not permit any of the served models")
        if not known:
            raise no_scheduler()
        fitting = [(u, s) for u, s in known if model in (None, s.model.name)]
        if not fitting:
            raise model_unknown(str(model), [s.model.name for _, s in known])
        if model is None and prefers is not None:
            fitting = [(u, s) for u, s in fitting if prefers(s.model)] or fitting
        # A scheduler that takes no requests now may recover (lost, or its executor is): last
        # choice.
        chosen, served = min(
            fitting,
            key=lambda pair: (not pair[0].takes_requests, pair[0].num_open, self._turns[pair[0]]),
        )
        self._turns[chosen] = next(self._next_turn)
        chosen.reserve()
        return chosen, served

    def _is_served(self, model: str | None, allowed: Collection[Upstream] | None) -> bool:
        """Returns whether `choose` finds a scheduler."""
        names = [each.name for each in self.models(allowed)]
        return bool(names) if model is None else model in names

    def _is_moving(self, model: str | None, allowed: Collection[Upstream] | None) -> bool:
        """Returns whether executors may be moving to a scheduler that `choose` would then find.

        True if a scheduler of `allowed` has no executor yet, and a scheduler that served `model`
        was lost or is being left. While no model is served, `model` may be an adapter of any.
        """
        since_s = asyncio.get_running_loop().time() - _MOVING_S
        moving = {name for name, lost_s in self._lost_s.items() if lost_s > since_s}
        moving |= {each.served.model.name for each in self._retired if each.served is not None}
        can_come = any(
            upstream.will_serve and (allowed is None or upstream in allowed)
            for upstream in self._upstreams
        )
        is_any = model is None or not self.models(allowed)
        return can_come and (bool(moving) if is_any else model in moving)

    def tell_lost(self, served: ServedByScheduler) -> None:
        """Notes that a scheduler that served `served` is lost."""
        now_s = asyncio.get_running_loop().time()
        # Schedulers choose the names, so expired entries are dropped to bound memory.
        self._lost_s = {k: s for k, s in self._lost_s.items() if s > now_s - _MOVING_S}
        self._lost_s[served.model.name] = now_s

    def tell_news(self) -> None:
        """Wakes waiting requests: the state of a scheduler has changed."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait_other(
        self, stopping: Upstream, digest: str, patience_s: float | None
    ) -> Upstream | None:
        """Waits for another scheduler for the model with `digest`, or for `stopping` to start anew.

        Returns None if none can be expected, or none came within `patience_s`. Executors of a
        scheduler that is being stopped move after its end, so others may have none until then.
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

    def find_other(self, without: Collection[Upstream], digest: str) -> Upstream | None:
        """Returns the least busy scheduler for the model with this digest, none of `without`.

        None without one.
        """
        return self._find(digest, without)

    def _find(self, digest: str, without: Collection[Upstream] = ()) -> Upstream | None:
        fitting = [
            upstream
            for upstream in self._upstreams
            if upstream not in without
            and upstream.takes_requests
            and upstream.served is not None
            and upstream.served.model.digest == digest
        ]
        return min(fitting, key=lambda each: (each.num_open, self._turns[each]), default=None)


async def _leave(upstream: Upstream) -> None:
    """Closes the session of `upstream`.

    Logs an error, so that the remaining schedulers close too.
    """
    try:
        await upstream.__aexit__(None, None, None)
    except SplitserveError as error:
        _log.warning("upstream_not_closed address=%s error=%r", upstream.address, str(error))
