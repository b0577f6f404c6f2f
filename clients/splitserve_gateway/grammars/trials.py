"""Trials of texts in processes that can be killed: in turns of tenants, each content once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve_gateway.grammars.check_process import CheckProcess
from splitserve_gateway.sharing import FairQueue
from splitserve_grammars import (
    FIRST_TRIAL_CPU_S,
    MAX_ADDRESS_BYTES,
    MAX_COMPILE_CPU_S,
    MAX_TRIAL_WALL_S,
    GrammarTrialResult,
    TrialKind,
    TrialTooSlow,
    TrialUnavailable,
    encode_task,
)

_MAX_SHARE = 4  # a tenant may have one in four of the waiting checks
_BROKEN = "the grammar could not be checked"

_log = logging.getLogger(__name__)


class GrammarCheckUnavailable(Exception):
    """Grammars cannot be checked now; nothing is known about this grammar."""


@dataclass(frozen=True, slots=True)
class CheckerLimits:
    """Bounds on grammar checks, in seconds, counts and bytes.

    `first_cpu_s`: CPU time of a grammar's first trial; slower grammars are tried again with
    `max_cpu_s`.
    """

    max_waiting: int = 256
    first_cpu_s: float = FIRST_TRIAL_CPU_S
    max_cpu_s: float = MAX_COMPILE_CPU_S
    max_address_bytes: int = MAX_ADDRESS_BYTES
    max_wall_s: float = MAX_TRIAL_WALL_S
    max_cached: int = 1024
    max_cached_bytes: int = 8 << 20


class FairTrials:
    """Trials of grammars, or of answers, in two lanes with a process each.

    First trials are short, so a quick one waits only for other first trials. Tenants take turns in
    both lanes.
    """

    def __init__(self, limits: CheckerLimits, kind: TrialKind = "grammar") -> None:
        """Starts no process; the first trial does. `kind`: what is tried."""
        self._limits = limits
        self._cache: OrderedDict[bytes, GrammarTrialResult] = OrderedDict()
        self._cached_bytes = 0
        self._checks: dict[bytes, _Check] = {}
        second = _Lane(self._limits, kind, self._limits.max_cpu_s)
        self._lanes = (_Lane(self._limits, kind, self._limits.first_cpu_s, second), second)
        self._workers: list[asyncio.Task[None]] = []
        self._is_closed = False

    async def close(self) -> None:
        """Ends the processes and fails the trials in progress."""
        self._is_closed = True
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for lane in self._lanes:
            await lane.process.close()
        for check in [*self._checks.values()]:
            self._end(check, GrammarCheckUnavailable("the grammar checker is closed"))

    async def verdict(self, kind: str, texts: Sequence[str], tenant: str) -> GrammarTrialResult:
        """Returns the verdict on `texts`, in turns of `tenant`. Raises GrammarCheckUnavailable."""
        key = hashlib.sha256(encode_task(kind, texts, 0)).digest()
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        check = self._checks.get(key) or self._begin(_Check(key, kind, texts, tenant))
        check.num_callers += 1
        try:
            # Shielded: other callers may share the check, and its verdict is cached.
            return await asyncio.shield(check.verdict)
        finally:
            check.num_callers -= 1
            if not check.num_callers and any(
                lane.waiting.discard(check.tenant, check) for lane in self._lanes
            ):
                self._end(check)

    def _begin(self, check: _Check) -> _Check:
        if self._is_closed:
            raise GrammarCheckUnavailable("the grammar checker is closed")
        max_waiting = self._limits.max_waiting
        of_tenant = sum(other.tenant == check.tenant for other in self._checks.values())
        if len(self._checks) >= max_waiting or of_tenant >= -(-max_waiting // _MAX_SHARE):
            raise GrammarCheckUnavailable("too many grammars wait to be checked")
        if not self._workers:
            self._workers = [asyncio.create_task(self._work(lane)) for lane in self._lanes]
        self._checks[check.key] = check
        self._lanes[0].waiting.put(check.tenant, check)
        return check

    async def _work(self, lane: _Lane) -> None:
        while True:
            check = await lane.waiting.take()
            try:
                verdict = await lane.process.ask(check.kind, check.texts, lane.max_cpu_s)
            except TrialTooSlow as error:
                if lane.slower is None:
                    verdict = GrammarTrialResult(str(error))
                else:
                    self._hand_on(check, lane.slower)
                    continue
            except TrialUnavailable as error:
                self._end(check, GrammarCheckUnavailable(str(error)))
                continue
            except Exception:
                # A bug fails the requests with this grammar only; the worker goes on.
                _log.exception("grammar_checker_broken")
                self._end(check, GrammarCheckUnavailable(_BROKEN))
                continue
            self._keep(check.key, verdict)
            self._end(check, verdict)

    def _hand_on(self, check: _Check, lane: _Lane) -> None:
        if check.num_callers:
            lane.waiting.put(check.tenant, check)
        else:
            self._end(check)

    def _end(
        self, check: _Check, outcome: GrammarTrialResult | GrammarCheckUnavailable | None = None
    ) -> None:
        if self._checks.pop(check.key, None) is None:
            return  # already ended by `close`
        if isinstance(outcome, GrammarTrialResult):
            check.verdict.set_result(outcome)
        elif outcome is None or not check.num_callers:
            check.verdict.cancel()
        else:
            check.verdict.set_exception(outcome)

    def _keep(self, key: bytes, verdict: GrammarTrialResult) -> None:
        self._cache[key] = verdict
        self._cached_bytes += _size(verdict)
        while (
            len(self._cache) > self._limits.max_cached
            or self._cached_bytes > self._limits.max_cached_bytes
        ):
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])


class _Check:
    """Grammar that waits for a trial or is in one. `tenant`: the first that asked."""

    def __init__(self, key: bytes, kind: str, texts: Sequence[str], tenant: str) -> None:
        self.key = key
        self.kind = kind
        self.texts = texts
        self.tenant = tenant
        self.num_callers = 0
        self.verdict: asyncio.Future[GrammarTrialResult] = (
            asyncio.get_running_loop().create_future()
        )


class _Lane:
    """Queue of checks and their process. `slower`: lane for checks that take too long here."""

    def __init__(
        self,
        limits: CheckerLimits,
        kind: TrialKind,
        max_cpu_s: float,
        slower: _Lane | None = None,
    ) -> None:
        self.max_cpu_s = max_cpu_s
        self.slower = slower
        self.process = CheckProcess(limits.max_address_bytes, limits.max_wall_s, kind)
        self.waiting: FairQueue[_Check] = FairQueue()


def _size(verdict: GrammarTrialResult) -> int:
    return 200 + 4 * len(verdict.error) + 4 * len(verdict.lark)
