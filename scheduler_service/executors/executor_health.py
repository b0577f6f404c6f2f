"""Health of executors by their results: retries elsewhere, withdraws, probes, takes back.

An executor whose steps fail answers fast, is idle first, and would get the most requests. So
results are judged before a core learns from them: a request that failed is taken away and tried on
another executor, and `CircuitBreakers` lays the failure on one of the two. A withdrawn executor
joins again with an empty cache and no requests, and computes probes of our own until one succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from scheduler_service.core.config import Feature
from scheduler_service.core.outcomes.losses import is_lost_too_often
from scheduler_service.core.plan import RowStatus, StepOutcome, StepStatus
from scheduler_service.core.request import Request, SchedulingParams
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.executor_link import ExecutorLost
from scheduler_service.fleet.circuit_breaker import MAX_EXECUTORS_PER_REQUEST, CircuitBreakers

# No client can name a request so.
_PROBE = "\0probe"
NUM_PROBE_TOKENS = 8
_ROW_FAILURES = (RowStatus.INVALID_LOGITS, RowStatus.FAILED)
# Requests of a failed step share trials with a quarter of the others on the next executor.
_NUM_GROUPS = 4
_PAST_TIME_S = 0.001

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthOwner:
    """Actions of the cluster. `known`: all executors. `withdraw`: has one join anew, with a reason.

    `retry`: has requests go on at another executor than the one that gave them away. `changed`: an
    executor takes requests again, or readiness may be another.
    """

    known: Callable[[], list[EngineLoop]]
    withdraw: Callable[[EngineLoop, str], None]
    retry: Callable[[EngineLoop, list[Request]], None]
    changed: Callable[[], None]


class ExecutorHealth:
    """Judges all results, and keeps executors that fail away from requests."""

    def __init__(self, now_ns: Callable[[], int], owner: HealthOwner) -> None:
        self._now_ns = now_ns
        self._owner = owner
        self._breakers = CircuitBreakers()
        # Probes under way, by life.
        self._probes: dict[tuple[str, int], Request] = {}
        self._num_probes = 0
        # Whether a probe ever succeeded; if not, it may be what no executor can compute. Then time
        # alone closes breakers, and requests that fail again are retried elsewhere again.
        self._is_probe_proven = self._is_probe_unusable = False
        # Executors whose probe failed before that was known.
        self._awaiting_proof: set[tuple[str, int]] = set()
        self._is_acting_soon = False
        self._alarm: asyncio.TimerHandle | None = None

    def is_withdrawn(self, life: tuple[str, int]) -> bool:
        """Returns whether an executor that joins is withdrawn and gets probes only."""
        return self._breakers.is_open(life)

    def avoids(self, request: Request, engine: EngineLoop) -> bool:
        """Whether the request failed on the executor, and got no token since."""
        return engine.life in self._breakers.failed_at(request.request_id)

    def close(self) -> None:
        """Stops all probes."""
        if self._alarm is not None:
            self._alarm.cancel()

    # -- what happens --------------------------------------------------------------------------

    def joined(self) -> None:
        """An executor is connected, or takes requests again."""
        self._act_soon()

    def gone(self, engine: EngineLoop) -> None:
        """The executor is lost, withdrawn or drained, and a probe with it."""
        self._probes.pop(engine.life, None)

    def request_ended(self, request_id: str) -> None:
        """Forgets failures of a request that has ended, for whatever reason."""
        self._breakers.ended(request_id)

    def probe_ended(self, request: Request) -> bool:
        """Takes note if the request that has ended is a probe; False: it is a client's."""
        if not request.request_id.startswith(_PROBE):
            return False
        for engine in self._owner.known():
            if self._probes.get(engine.life) is request:
                del self._probes[engine.life]
                self._probe_over(engine, is_passed=request.error is None)
        return True

    def judge(self, engine: EngineLoop, outcome: StepOutcome) -> None:
        """Looks at a result that the core does not know yet; takes requests away that failed.

        Raises ContractBroken, CoreBroken.
        """
        core, life = engine.scheduler, engine.life
        is_expected = outcome.step_id == core.oldest_step_in_flight
        if outcome.status is StepStatus.NEED_SNAPSHOT or not is_expected:
            return
        has_no_tokens = _exceeds(outcome, core.config.vocab_size)
        if not has_no_tokens and self._says_nothing(engine, outcome):
            return
        if has_no_tokens and outcome.status is StepStatus.OK:
            outcome = core.checked(outcome)
        rows = core.oldest_rows()
        failed, succeeded = _split(rows, outcome)
        probe = self._probes.get(life)
        if probe is not None and failed.pop(probe.request_id, None) is not None:
            del self._probes[life]
            engine.withdraw(probe.request_id)
            asyncio.get_running_loop().call_soon(self._probe_failed, engine)
        succeeded.discard(_PROBE if probe is None else probe.request_id)
        if succeeded:
            self._breakers.succeeded(life, succeeded)
            self._note_tokens(engine)
        if failed:
            self._take_away(engine, list(failed.values()), outcome)
        if failed or self._breakers.to_open:
            self._act_soon()

    def _says_nothing(self, engine: EngineLoop, outcome: StepOutcome) -> bool:
        """Whether all rows did well, and no failure is to be explained by that."""
        is_well = outcome.status is StepStatus.OK and outcome.row_statuses is None
        return is_well and not engine.is_failing and self._breakers.is_quiet(engine.life)

    def _note_tokens(self, engine: EngineLoop) -> None:
        if engine.is_failing and not engine.is_withdrawn:
            engine.is_failing = False
            _log.info("executor_recovered address=%s", engine.life[0])
            self._owner.changed()

    def _take_away(self, engine: EngineLoop, requests: list[Request], outcome: StepOutcome) -> None:
        """Moves requests of failed rows, and those whose steps failed here twice."""
        is_step = outcome.status is not StepStatus.OK
        again = {r.request_id for r in requests if self.avoids(r, engine)}
        self._breakers.failed(engine.life, [request.request_id for request in requests])
        moved = []
        for request in requests:
            # A first failed step may be chance, and is repeated where its KV is.
            if is_step and request.request_id not in again:
                continue
            if not self._can_move(request, engine):
                continue
            taken = engine.withdraw(request.request_id)
            if taken is not None:
                if is_step:
                    _make_suspect(taken, len(requests))
                moved.append(taken)
        if moved:
            self._owner.retry(engine, moved)

    def _can_move(self, request: Request, engine: EngineLoop) -> bool:
        """Whether the request has another executor to try, and has not tried too many."""
        if len(self._breakers.failed_at(request.request_id)) >= MAX_EXECUTORS_PER_REQUEST:
            return False
        return any(
            other is not engine
            and not self.avoids(request, other)
            and other.scheduler.fits(request)
            for other in self._owner.known()
            if other.is_serving
        )

    # -- what follows --------------------------------------------------------------------------

    def _act_soon(self) -> None:
        """Not now: a core is about to learn from a result."""
        if not self._is_acting_soon:
            self._is_acting_soon = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        """Withdraws executors with open breakers, and starts probes that are due."""
        self._is_acting_soon = False
        now_ns = self._now_ns()
        for engine in self._find(self._breakers.to_open):
            why = "its requests failed, and succeeded on other executors"
            if not self._withdraw(engine, why):
                self._mark_failing(engine)
        for engine in self._owner.known():
            if engine.is_failing and not engine.is_withdrawn:
                self._withdraw(engine, "it fails whatever it is given")
        self._probe_those_due(now_ns)

    def _probe_those_due(self, now_ns: int) -> None:
        waiting = []
        for engine in self._find([*self._breakers.suspected, *self._breakers.opened]):
            at_ns = self._breakers.probe_at_ns(engine.life)
            if self._is_probing(engine):
                continue
            if at_ns > now_ns:
                waiting.append(at_ns)
            elif self._is_probe_unusable:
                self._passed(engine)
            else:
                self._probe(engine)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if waiting:
            delay_s = max(0, min(waiting) - now_ns) / 1e9 + _PAST_TIME_S
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._act)

    def _find(self, lives: Iterable[object]) -> list[EngineLoop]:
        """Those of these lives that are connected and to stay."""
        wanted = set(lives)
        return [
            engine
            for engine in self._owner.known()
            if engine.life in wanted and engine.is_connected and not engine.is_draining
        ]

    def _withdraw(self, engine: EngineLoop, why: str) -> bool:
        """Opens the breaker, if another executor takes requests that does not fail itself."""
        others = (other for other in self._owner.known() if other is not engine)
        if not any(other.takes_requests and not other.is_failing for other in others):
            return False
        self._breakers.open(engine.life, self._now_ns())
        self._owner.withdraw(engine, why)
        return True

    def _mark_failing(self, engine: EngineLoop) -> None:
        """Marks the only executor as failing: its requests end by name, and readiness says why."""
        if not engine.is_failing:
            engine.is_failing = True
            _log.error("executor_failing address=%s", engine.life[0])
            self._owner.changed()

    def _is_probing(self, engine: EngineLoop) -> bool:
        probe = self._probes.get(engine.life)
        return probe is not None and probe.request_id in engine.scheduler.unfinished_request_ids

    # -- probes --------------------------------------------------------------------------------

    def _probe(self, engine: EngineLoop) -> None:
        """Has the executor compute a few tokens of a request of ours, in steps of its own."""
        self._num_probes += 1
        features = engine.scheduler.config.features
        request = Request.create(
            f"{_PROBE}{self._num_probes}",
            [0],
            SamplingParams(temperature=0.0, max_tokens=NUM_PROBE_TOKENS, ignore_eos=True),
            arrival=0,
            seed=0,
            scheduling=SchedulingParams(uses_prefix_cache=False),
            encoder_token_ids=[0] if Feature.CROSS_ATTENTION in features else None,
        )
        # It shares no step with others, and is not acquitted before its last token.
        request.trial_size, request.num_trials_left = 1, NUM_PROBE_TOKENS + 1
        self._probes[engine.life] = request
        try:
            engine.readmit(request)
        except ExecutorLost:
            self._probes.pop(engine.life, None)

    def _probe_failed(self, engine: EngineLoop) -> None:
        self._probe_over(engine, is_passed=False)

    def _probe_over(self, engine: EngineLoop, *, is_passed: bool) -> None:
        if is_passed:
            self._is_probe_proven, self._is_probe_unusable = True, False
            self._awaiting_proof.discard(engine.life)
            self._passed(engine)
            for other in self._find(self._awaiting_proof):
                self._give_up(other)
            self._awaiting_proof.clear()
        else:
            self._failed(engine)
        self._act_soon()

    def _passed(self, engine: EngineLoop) -> None:
        was_withdrawn = self._breakers.is_open(engine.life)
        self._breakers.probe_passed(engine.life, self._now_ns())
        if was_withdrawn or engine.is_failing:
            engine.is_withdrawn = engine.is_failing = False
            _log.warning("executor_reinstated address=%s", engine.life[0])
            self._owner.changed()

    def _failed(self, engine: EngineLoop) -> None:
        _log.warning("executor_probe_failed address=%s", engine.life[0])
        is_open = self._breakers.is_open(engine.life)
        self._breakers.probe_failed(engine.life, self._now_ns())
        if not self._is_probe_proven:
            if not is_open and not self._breakers.is_suspected(engine.life):
                self._is_probe_unusable = True
            if self._is_probe_unusable or self._prove_elsewhere(engine):
                self._awaiting_proof.add(engine.life)
                return
        self._give_up(engine)

    def _give_up(self, engine: EngineLoop) -> None:
        """It fails requests, and a probe that others can compute."""
        if self._breakers.is_suspected(engine.life):
            why = "it fails whatever it is given, and a request of the scheduler's own"
            if not self._withdraw(engine, why):
                self._mark_failing(engine)

    def _prove_elsewhere(self, engine: EngineLoop) -> bool:
        """Tries the probe on an executor that does well; whether there is one."""
        for other in self._owner.known():
            is_well = other.takes_requests and not self._breakers.is_suspected(other.life)
            if other is not engine and is_well:
                if not self._is_probing(other):
                    self._probe(other)
                return True
        return False


def _exceeds(outcome: StepOutcome, vocab_size: int) -> bool:
    """Returns whether a sampled token is outside the vocabulary."""
    return len(outcome.token_ids) > 0 and int(outcome.token_ids.max()) >= vocab_size


def _split(rows: list[Request | None], outcome: StepOutcome) -> tuple[dict[str, Request], set[str]]:
    """The requests that failed, and those that got tokens; of both, it failed."""
    if outcome.status is not StepStatus.OK:
        return {row.request_id: row for row in rows if row is not None}, set()
    statuses = outcome.row_statuses or ()
    failed = {
        row.request_id: row
        for row, status in zip(rows, statuses, strict=False)
        if row is not None and status in _ROW_FAILURES
    }
    counts = outcome.counts
    succeeded = {
        row.request_id
        for row, has_token in zip(rows, np.asarray(counts > 0).tolist(), strict=False)
        if row is not None and has_token
    }
    return failed, succeeded - failed.keys()


def _make_suspect(request: Request, num_requests: int) -> None:
    """Counts the loss; the request runs apart from others until it has a token."""
    is_lost_too_often(request, sum(len(each.token_ids) for each in request.sequences))
    size = -(-num_requests // _NUM_GROUPS)
    request.trial_size = min(size, request.trial_size or size)
