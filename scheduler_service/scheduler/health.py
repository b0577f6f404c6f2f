"""Health of executors, judged by step results: request moves, withdrawal, probes, reinstatement.

An executor whose steps fail answers fast, is idle first, and would get the most requests. So
results are judged before an engine learns from them: a request that failed is tried on another
executor, and `CircuitBreakers` blames one of the two. A withdrawn executor joins again with an
empty cache and without requests, and computes probes of the scheduler until one succeeds.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from scheduler_service.scheduler.circuit_breaker import MAX_EXECUTORS_PER_REQUEST, CircuitBreakers
from scheduler_service.scheduler.effects import HealthChange
from scheduler_service.scheduler.engine.outcomes import is_lost_too_often
from scheduler_service.scheduler.executor_state import ExecutorState, Life
from scheduler_service.scheduler.values import (
    EncoderFeatures,
    Feature,
    PoolingParams,
    Request,
    RowStatus,
    SamplingParams,
    SchedulingParams,
    StepOutcome,
    StepStatus,
)

# Prefix of probe ids; no client can use such a request id.
_PROBE = "\0probe"
NUM_PROBE_TOKENS = 8
_ROW_FAILURES = (RowStatus.INVALID_LOGITS, RowStatus.FAILED)
# A trial takes at most a quarter of the requests of the failed step.
_NUM_GROUPS = 4


@dataclass(frozen=True, slots=True)
class WithdrawExecutor:
    """Removes the executor, which joins again with an empty cache."""

    executor: ExecutorState
    why: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Has the executor compute `request`, a probe of the scheduler."""

    executor: ExecutorState
    request: Request


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """Reports a change of health; the flags of the executor have the new values already."""

    executor: ExecutorState
    change: HealthChange


HealthAction: TypeAlias = WithdrawExecutor | Probe | HealthChanged


@dataclass(slots=True)
class Judgement:
    """Decision about the result of a step. Its requests are still at their executor.

    `moves`: requests to be tried on another executor. `num_suspects`: number of requests of a step
    that failed as a whole; 0 if the step did not. `failed_probe`: the probe that failed in the
    step.
    """

    moves: list[Request] = field(default_factory=list)
    num_suspects: int = 0
    failed_probe: Request | None = None


class ExecutorHealth:
    """Judges step results. `act` yields the actions that follow from results and from the time.

    `executors`: the scheduler's executors by address; read only, except for their health flags.
    """

    def __init__(self, executors: Mapping[str, ExecutorState]) -> None:
        self._executors = executors
        self._breakers = CircuitBreakers()
        # Probes under way, by executor life.
        self._probes: dict[Life, Request] = {}
        self._num_probes = 0
        # Whether a probe ever succeeded. If none did, the probe itself may be impossible to
        # compute. Then breakers close by time alone, and requests that fail again are tried
        # elsewhere again.
        self._is_probe_proven = self._is_probe_unusable = False
        # Executor lives whose probe failed before any probe succeeded.
        self._awaiting_proof: set[Life] = set()
        # Executor lives whose probe ended since the last `act`, and whether the probe succeeded.
        self._ended_probes: list[tuple[Life, bool]] = []
        # Failing executors that brought a token since the last `act`.
        self._recovered: list[ExecutorState] = []
        self.is_due = False
        self.next_probe_ns: int | None = None

    def is_withdrawn(self, life: Life) -> bool:
        """Returns whether an executor that joins with `life` gets probes only."""
        return self._breakers.is_open(life)

    def avoids(self, request: Request, executor: ExecutorState) -> bool:
        """Returns whether the request failed on the executor and got no token since."""
        return executor.life in self._breakers.failed_at(request.request_id)

    def has_failed(self, request: Request) -> bool:
        """Returns whether the request failed on some executor and got no token since."""
        return bool(self._breakers.failed_at(request.request_id))

    def closed_to(self, request: Request) -> Collection[Hashable]:
        """Returns executor lives on which the request failed, while an untried executor can run it.

        The request waits for an untried executor even while that one is slow to answer.
        """
        lives = self._breakers.failed_at(request.request_id)
        return lives if lives and self._has_untried(request) else ()

    # -- reported events -----------------------------------------------------------------------

    def executor_changed(self) -> None:
        """Makes `act` due after an executor began to serve, or takes requests again."""
        self.is_due = True

    def executor_gone(self, executor: ExecutorState) -> None:
        """Forgets the probe of an executor that is lost, withdrawn or drained."""
        self._probes.pop(executor.life, None)

    def request_ended(self, request_id: str) -> None:
        """Forgets failures of a request that has ended, for whatever reason."""
        self._breakers.ended(request_id)

    def probe_ended(self, request: Request) -> bool:
        """Notes the end of a probe. Returns False for a client's request, which is not a probe."""
        if not request.request_id.startswith(_PROBE):
            return False
        for life, probe in list(self._probes.items()):
            if probe is request:
                del self._probes[life]
                self._ended_probes.append((life, request.error is None))
                self.is_due = True
        return True

    def judge(self, executor: ExecutorState, outcome: StepOutcome) -> Judgement | None:
        """Judges a result before the engine learns from it; returns None for a healthy result.

        Raises ContractBroken.
        """
        engine, life = executor.engine, executor.life
        is_expected = outcome.step_id == engine.oldest_step_in_flight
        if outcome.status is StepStatus.NEED_SNAPSHOT or not is_expected:
            return None
        has_no_tokens = _exceeds(outcome, executor.config.vocab_size)
        if not has_no_tokens and self._says_nothing(executor, outcome):
            return None
        if has_no_tokens and outcome.status is StepStatus.OK:
            outcome = engine.checked(outcome)
        failed, succeeded = _split(engine.oldest_rows(), outcome)
        judgement = Judgement()
        probe = self._probes.get(life)
        if probe is not None and failed.pop(probe.request_id, None) is not None:
            del self._probes[life]
            judgement.failed_probe = probe
            self._ended_probes.append((life, False))
        succeeded.discard(_PROBE if probe is None else probe.request_id)
        if succeeded:
            self._breakers.succeeded(life, succeeded)
            if executor.is_failing and not executor.is_withdrawn:
                self._recovered.append(executor)
        if failed:
            judgement.moves = self._moving(executor, list(failed.values()), outcome)
            judgement.num_suspects = len(failed) if outcome.status is not StepStatus.OK else 0
        self.is_due |= bool(
            failed or self._breakers.to_open or self._recovered or self._ended_probes
        )
        return judgement

    def _says_nothing(self, executor: ExecutorState, outcome: StepOutcome) -> bool:
        """Returns whether all rows succeeded while no earlier failure awaits an explanation."""
        is_well = outcome.status is StepStatus.OK and outcome.row_statuses is None
        return is_well and not executor.is_failing and self._breakers.is_quiet(executor.life)

    def _moving(
        self, executor: ExecutorState, requests: list[Request], outcome: StepOutcome
    ) -> list[Request]:
        """Returns the requests of failed rows, or of a failed step, that are to move.

        A request of a failed step moves only if it failed on this executor before.
        """
        is_step = outcome.status is not StepStatus.OK
        again = {r.request_id for r in requests if self.avoids(r, executor)}
        self._breakers.failed(executor.life, [request.request_id for request in requests])
        # The first failure of a step may be chance, so the step is repeated where its KV is.
        return [
            request
            for request in requests
            if (not is_step or request.request_id in again) and self._can_move(request, executor)
        ]

    def _can_move(self, request: Request, executor: ExecutorState) -> bool:
        """Returns whether an untried executor may run it, within MAX_EXECUTORS_PER_REQUEST."""
        if len(self._breakers.failed_at(request.request_id)) >= MAX_EXECUTORS_PER_REQUEST:
            return False
        return self._has_untried(request, executor)

    def _has_untried(self, request: Request, executor: ExecutorState | None = None) -> bool:
        """Returns whether another serving executor fits the request and has not failed it."""
        return any(
            other is not executor
            and other.is_serving
            and not self.avoids(request, other)
            and other.engine.fits(request)
            for other in self._executors.values()
        )

    # -- actions -------------------------------------------------------------------------------

    def act(self, now_ns: int) -> Iterator[HealthAction]:
        """Yields the actions due now; the caller performs each before it asks for the next."""
        self.is_due = False
        for executor in self._take_recovered():
            if executor.is_failing and not executor.is_withdrawn:
                executor.is_failing = False
                yield HealthChanged(executor, HealthChange.RECOVERED)
        while self._ended_probes:
            life, is_passed = self._ended_probes.pop(0)
            for executor in self._find([life]):
                yield from self._probe_over(executor, now_ns, is_passed=is_passed)
        for executor in self._find(self._breakers.to_open):
            why = "requests that failed here succeeded on other executors"
            yield from self._withdraw(executor, now_ns, why)
        for executor in list(self._executors.values()):
            if executor.is_failing and not executor.is_withdrawn:
                yield from self._withdraw(executor, now_ns, "all requests fail")
        yield from self._probe_those_due(now_ns)

    def _take_recovered(self) -> list[ExecutorState]:
        recovered, self._recovered = self._recovered, []
        return recovered

    def _probe_those_due(self, now_ns: int) -> Iterator[HealthAction]:
        waiting: list[int] = []
        for executor in self._find([*self._breakers.suspected, *self._breakers.opened]):
            at_ns = self._breakers.probe_at_ns(executor.life)
            if self._is_probing(executor):
                continue
            if at_ns > now_ns:
                waiting.append(at_ns)
            elif self._is_probe_unusable:
                yield from self._passed(executor, now_ns)
            else:
                yield self._probe(executor)
        self.next_probe_ns = min(waiting, default=None)

    def _find(self, lives: Iterable[object]) -> list[ExecutorState]:
        """Returns executors with these lives that are connected and not draining."""
        wanted = set(lives)
        return [
            executor
            for executor in self._executors.values()
            if executor.life in wanted and executor.is_connected and not executor.is_draining
        ]

    def _withdraw(self, executor: ExecutorState, now_ns: int, why: str) -> Iterator[HealthAction]:
        """Opens the breaker if a healthy executor besides this one takes requests.

        Otherwise marks the executor as failing: its requests end with an error that names the
        cause, and the readiness check says why.
        """
        others = (other for other in self._executors.values() if other is not executor)
        if any(other.takes_requests and not other.is_failing for other in others):
            self._breakers.open(executor.life, now_ns)
            yield WithdrawExecutor(executor, why)
        elif not executor.is_failing:
            executor.is_failing = True
            yield HealthChanged(executor, HealthChange.FAILING)

    def _is_probing(self, executor: ExecutorState) -> bool:
        probe = self._probes.get(executor.life)
        return probe is not None and probe.request_id in executor.engine.placement.requests

    # -- probes --------------------------------------------------------------------------------

    def _probe(self, executor: ExecutorState) -> Probe:
        """Makes a probe: a request for NUM_PROBE_TOKENS tokens or a vector, in steps of its own."""
        self._num_probes += 1
        has_encoder = Feature.CROSS_ATTENTION in executor.config.features
        features = EncoderFeatures.silence(executor.config)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_PROBE_TOKENS, ignore_eos=True)
        if executor.config.vectors is not None:
            params = SamplingParams(pooling=PoolingParams())
        request = Request.create(
            f"{_PROBE}{self._num_probes}",
            [0],
            params,
            arrival=0,
            seed=0,
            scheduling=SchedulingParams(uses_prefix_cache=False),
            encoder_token_ids=[0] if has_encoder and features is None else None,
            encoder_features=features,
        )
        # The probe shares no step with other requests, and is not acquitted before its last token.
        request.trial_size, request.num_trials_left = 1, NUM_PROBE_TOKENS + 1
        self._probes[executor.life] = request
        return Probe(executor, request)

    def _probe_over(
        self, executor: ExecutorState, now_ns: int, *, is_passed: bool
    ) -> Iterator[HealthAction]:
        if not is_passed:
            yield from self._failed(executor, now_ns)
            return
        self._is_probe_proven, self._is_probe_unusable = True, False
        self._awaiting_proof.discard(executor.life)
        yield from self._passed(executor, now_ns)
        awaiting, self._awaiting_proof = self._find(self._awaiting_proof), set()
        for other in awaiting:
            yield from self._give_up(other, now_ns)

    def _passed(self, executor: ExecutorState, now_ns: int) -> Iterator[HealthAction]:
        was_withdrawn = self._breakers.is_open(executor.life)
        self._breakers.probe_passed(executor.life, now_ns)
        if was_withdrawn or executor.is_failing:
            executor.is_withdrawn = executor.is_failing = False
            yield HealthChanged(executor, HealthChange.REINSTATED)

    def _failed(self, executor: ExecutorState, now_ns: int) -> Iterator[HealthAction]:
        yield HealthChanged(executor, HealthChange.PROBE_FAILED)
        is_open = self._breakers.is_open(executor.life)
        self._breakers.probe_failed(executor.life, now_ns)
        if not self._is_probe_proven:
            if not is_open and not self._breakers.is_suspected(executor.life):
                self._is_probe_unusable = True
            proving = None if self._is_probe_unusable else self._find_well(executor)
            if self._is_probe_unusable or proving is not None:
                self._awaiting_proof.add(executor.life)
                if proving is not None and not self._is_probing(proving):
                    yield self._probe(proving)
                return
        yield from self._give_up(executor, now_ns)

    def _give_up(self, executor: ExecutorState, now_ns: int) -> Iterator[HealthAction]:
        """Withdraws an executor that fails every request and a probe known to be computable."""
        if self._breakers.is_suspected(executor.life):
            why = "all requests and the scheduler's probe fail"
            yield from self._withdraw(executor, now_ns, why)

    def _find_well(self, executor: ExecutorState) -> ExecutorState | None:
        """Returns a healthy executor, other than `executor`, to try the probe; else None."""
        for other in self._executors.values():
            is_well = other.takes_requests and not self._breakers.is_suspected(other.life)
            if other is not executor and is_well:
                return other
        return None


def _exceeds(outcome: StepOutcome, vocab_size: int) -> bool:
    """Returns whether a sampled token is outside the vocabulary."""
    return len(outcome.token_ids) > 0 and int(outcome.token_ids.max()) >= vocab_size


def _split(rows: list[Request | None], outcome: StepOutcome) -> tuple[dict[str, Request], set[str]]:
    """Returns failed requests by id, and ids of requests that got tokens and did not fail."""
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


def make_suspect(request: Request, num_requests: int) -> None:
    """Counts a loss of a request of a failed step of `num_requests`, and marks it as a suspect.

    The suspect runs apart from other requests until it has a token. Sets `request.trial_size`.
    """
    is_lost_too_often(request, sum(len(each.token_ids) for each in request.sequences))
    size = -(-num_requests // _NUM_GROUPS)
    request.trial_size = min(size, request.trial_size or size)
