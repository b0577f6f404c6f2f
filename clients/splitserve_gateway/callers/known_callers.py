"""Callers that schedulers were asked about lately, so that not every request asks again."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from splitserve_gateway.callers.caller import Caller
from splitserve_gateway.http.errors import caller_unknown, too_many_strangers
from splitserve_gateway.sharing.turn_places import TooManyWait, TurnPlaces

# None: no scheduler knows the credential. Raises ApiError if none can be asked, and AskAgain.
Ask = Callable[[str], Awaitable[Caller | None]]


class AskAgain(Exception):
    """Schedulers were shown too much that is nobody's: they say something in `delay_s`."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"in {delay_s:g} s")
        self.delay_s = delay_s


@dataclass(frozen=True, slots=True)
class Memory:
    """How long answers hold, and how many there may be.

    `max_known`, `max_unknown`: credentials of either kind that are remembered. `max_strangers`:
    that are being asked about and were not known before. `max_waiting`: of these, that wait for
    that, for `patience_s` at most. `most_asks`: how often it is asked about one, if schedulers
    say that they were asked about too many.
    """

    known_s: float = 5.0
    unknown_s: float = 1.0
    max_known: int = 8192
    max_unknown: int = 8192
    max_strangers: int = 32
    max_waiting: int = 256
    patience_s: float = 2.0
    most_asks: int = 3


class KnownCallers:
    """Asks about each credential once at a time, and remembers the answer for a while.

    Credentials themselves are not kept, their SHA-256 is. Those of strangers have bounds of their
    own: whoever tries out keys delays nobody who is known. Strangers take turns by where they come
    from, so that whoever tries out keys delays those of elsewhere by one question at most. Where
    schedulers have enough of that, those whose turn it is keep it and ask again: so a flood comes
    no faster than schedulers bear, and whose turn it is decides who is answered, not luck.
    """

    def __init__(
        self,
        ask: Ask,
        clock: Callable[[], float],
        memory: Memory | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._sleep = sleep
        self._memory = memory or Memory()
        self._known: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()
        self._unknown: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Caller | None]] = {}
        self._strangers = TurnPlaces(self._memory.max_strangers, self._memory.max_waiting)

    async def identify(self, credential: str, origin: str = "") -> Caller:
        """Whose it is. `origin`: from where it comes.

        Raises ApiError: 401 if it is nobody's, 503 if it cannot be found out now.
        """
        digest = hashlib.sha256(credential.encode()).digest()
        caller = self._remembered(digest)
        if caller is None:
            # Whoever asked first may leave; the others still want the answer.
            caller = await asyncio.shield(self._asked(digest, credential, origin))
        if caller is None:
            raise caller_unknown("the credential is not valid")
        return caller

    def _remembered(self, digest: bytes) -> Caller | None:
        """Raises ApiError if it is remembered as nobody's."""
        now_s = self._clock()
        if now_s < self._unknown.get(digest, now_s):
            raise caller_unknown("the credential is not valid")
        until_s, caller = self._known.get(digest, (now_s, None))
        if caller is None:
            return None
        self._known.move_to_end(digest)
        # Those that know it are gone, and others may have come.
        return caller if now_s < until_s and caller.is_served else None

    def _asked(self, digest: bytes, credential: str, origin: str) -> asyncio.Task[Caller | None]:
        task = self._asking.get(digest)
        if task is not None:
            return task
        is_known = digest in self._known
        finding_out = (
            self._find_out(digest, credential)
            if is_known
            else self._find_out_in_turn(digest, credential, origin)
        )
        task = asyncio.create_task(finding_out)
        self._asking[digest] = task

        def is_over(done: asyncio.Task[Caller | None]) -> None:
            del self._asking[digest]
            if not done.cancelled():
                # Whoever wanted to know it may have left.
                done.exception()

        task.add_done_callback(is_over)
        return task

    async def _find_out_in_turn(self, digest: bytes, credential: str, origin: str) -> Caller | None:
        """Raises ApiError."""
        try:
            async with self._strangers.place(origin, self._memory.patience_s):
                return await self._find_out(digest, credential)
        except (TooManyWait, TimeoutError) as error:
            raise too_many_strangers() from error

    async def _ask_patiently(self, credential: str) -> Caller | None:
        """Raises ApiError."""
        for _ in range(self._memory.most_asks - 1):
            try:
                return await self._ask(credential)
            except AskAgain as again:
                await self._sleep(again.delay_s)
        try:
            return await self._ask(credential)
        except AskAgain as error:
            raise too_many_strangers() from error

    async def _find_out(self, digest: bytes, credential: str) -> Caller | None:
        caller = await self._ask_patiently(credential)
        now_s = self._clock()
        if caller is None:
            self._known.pop(digest, None)
            self._unknown[digest] = now_s + self._memory.unknown_s
            self._unknown.move_to_end(digest)
            if len(self._unknown) > self._memory.max_unknown:
                self._unknown.popitem(last=False)
        else:
            self._unknown.pop(digest, None)
            self._known[digest] = (now_s + self._memory.known_s, caller)
            self._known.move_to_end(digest)
            if len(self._known) > self._memory.max_known:
                self._known.popitem(last=False)
        return caller
