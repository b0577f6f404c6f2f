"""Membership of executors: they join, serve, leave and are lost.

Changes are reported to the scheduler as events; its decisions come back as effects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from scheduler_service.config import ClusterConfig
from scheduler_service.executors.adapter_loader import AdapterSources
from scheduler_service.executors.answer_watch import AnswerWatch, SignsOfLife
from scheduler_service.executors.applicants import VERIFY_TIMEOUT_S, Applicants, IdleChecks, Tasks
from scheduler_service.executors.drains import Drained, Drains
from scheduler_service.executors.executor_link import ExecutorLost, Link, LinkConfig
from scheduler_service.executors.executor_session import (
    ExecutorSession,
    Life,
    Lives,
    Report,
    StepAlarm,
)
from scheduler_service.executors.handshake import (
    check_model,
    core_config,
    epoch_for,
    measured_step,
)
from scheduler_service.scheduler import ExecutorGone, LossCause, events
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_contract import DomainError
from splitserve_rpc import TICK_S, PeerState

_SHOWN_CHARS = 200
# A live executor shows a sign of life within two seconds, because it is asked.
_LATELY_NS = 2_500_000_000

Connect = Callable[[executor.ExecutorInfo, LinkConfig], Link]

_log = logging.getLogger(__name__)


class Membership:
    """Sessions of all executors, by address, in order of registration.

    `tokenizer_files`: tokenizer files of the model; empty before an executor was connected.
    """

    def __init__(
        self,
        config: ClusterConfig,
        scheduler_epoch: int,
        now_ns: Callable[[], int],
        connect: Connect,
        report: Report,
        sources: AdapterSources,
    ) -> None:
        self._config = config
        self._sources = sources
        self._scheduler_epoch = scheduler_epoch
        self._now_ns = now_ns
        self._connect = connect
        self._report = report
        self.sessions: dict[str, ExecutorSession] = {}
        self._tasks = Tasks()
        self._lives = Lives(config.step_patience_s, config.step_timeout_s)
        self._pulse = SignsOfLife()
        # Latest message of any kind of each executor, which may hang in a step nevertheless.
        self._signs_of_life = SignsOfLife()
        self._idle_checks = IdleChecks(self._pulse, now_ns, self.sessions.values)
        self._drains = Drains()
        self._applicants = Applicants(self._drains, config.step_patience_s)
        self._accepted_model: executor.ModelInfo | None = None
        self._has_served = False
        self._is_closed = False
        self.tokenizer_files: dict[str, bytes] = {}

    @property
    def model(self) -> executor.ModelInfo | None:
        """Model that clients are served; None before an executor was connected.

        The model stays the same as long as this process lives, whatever executors come and go.
        """
        return self._accepted_model if self._has_served else None

    @property
    def num_steps_answered(self) -> int:
        """Number of steps answered by all executors since the process started."""
        return self._pulse.num_steps

    @property
    def step_allowed_s(self) -> float:
        """Seconds within which some step must be answered, if there is work."""
        allowed_s = (session.steps.watch.allowed_s for session in self.sessions.values())
        return max(allowed_s, default=0.0) or self._config.step_patience_s

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Sets the weights of tenants for executors that join from now on."""
        policies = replace(self._config.policies, tenant_weights=weights)
        self._config = replace(self._config, policies=policies)

    # -- Joining -------------------------------------------------------------------------------

    async def join(self, info: executor.ExecutorInfo, target: str | None = None) -> None:
        """Takes in the executor that answers at `target`, if its GetInfo matches `info`.

        `target`: address to dial in place of `info.address`, None to dial that. An executor that
        does not answer is not taken in, and may register again. Raises DomainError.
        """
        check_model(info, self._accepted_model)
        if self._is_known(info):
            return
        self._drains.check(info)
        with self._applicants.place(info.address):
            await self._ask_and_take(info, target)

    async def _ask_and_take(self, info: executor.ExecutorInfo, target: str | None) -> None:
        life = self._lives.of(info.address, info.executor_epoch, measured_step(info))
        steps = self._steps_of(info, life)
        config = LinkConfig(
            self._config.reconnect_timeout_s,
            self._config.step_timeout_s,
            target,
            lambda is_cut: steps.connected(is_cut=is_cut),
            lambda state, quiet_s: self._look(info, steps, state, quiet_s),
        )
        link, is_taken = self._connect(info, config), False
        try:
            answer = await self._applicants.ask(info, link, life)
            check_model(info, self._accepted_model)  # another executor may have joined meanwhile
            if answer is not None and not self._is_known(info) and not self._is_closed:
                epoch = epoch_for(answer, self._scheduler_epoch)
                self._take(link, life, steps, epoch)
                is_taken = True
        finally:
            if not is_taken:
                await link.close()

    def _look(
        self, info: executor.ExecutorInfo, steps: StepAlarm, state: PeerState, quiet_s: float
    ) -> bool:
        """Records whether an executor answers; returns whether it may be given up if silent.

        The last live executor is not given up, nor are all executors if this side hears nothing.
        """
        if not self._is_known(info):
            return False
        now_ns, is_silent = self._now_ns(), state is PeerState.SILENT
        if quiet_s <= TICK_S:
            self._signs_of_life.show(info.address, now_ns)
        if is_silent and not steps.watch.is_silent:
            _log.warning("executor_silent address=%s quiet_s=%.3g", info.address, quiet_s)
        steps.silent(is_silent=is_silent)
        return self._signs_of_life.is_another_alive(info.address, now_ns - _LATELY_NS)

    def _is_known(self, info: executor.ExecutorInfo) -> bool:
        session = self.sessions.get(info.address)
        return session is not None and session.info.executor_epoch == info.executor_epoch

    def _steps_of(self, info: executor.ExecutorInfo, life: Life) -> StepAlarm:
        return StepAlarm(
            AnswerWatch(info.address, life.patience, self._pulse),
            self._now_ns,
            block_size=info.block_size_tokens,
            ask_others=lambda: self._idle_checks.begin(info.address),
            doubted=lambda is_doubtful: self._report(
                events.ExecutorDoubted(info.address, is_doubtful), None
            ),
        )

    def _take(self, link: Link, life: Life, steps: StepAlarm, scheduler_epoch: int) -> None:
        """Takes in a verified executor, and starts its session.

        Raises DomainError if no engine can be made for the executor; then nothing has changed.
        """
        info = link.info
        try:
            config = core_config(info, self._config)
            joined = events.ExecutorJoined(
                info.address,
                info.executor_epoch,
                config,
                min(self._config.pipeline_depth, info.limits.max_inflight_steps),
                life.last_step_id,
                scheduler_epoch,
            )
            session = ExecutorSession(
                link, config, life, steps, scheduler_epoch, self._report, self._sources
            )
            self._report(joined, None)
        except (ValueError, OverflowError, MemoryError, OSError) as error:
            message = f"cannot create an engine for the executor: {error}"
            raise DomainError("EXECUTOR_INFO_INVALID", message) from error
        self._accepted_model = info.model
        self._lives.keep(info.address, life)
        self.sessions[info.address] = session
        session.task = self._tasks.begin(self._run(session))

    # -- Leaving -------------------------------------------------------------------------------

    async def drain(self, address: str, timeout_s: float) -> Drained:
        """Drains an executor, and returns when the executor is removed. Raises DomainError.

        Cancelling the call does not cancel the drain.
        """
        session = self.sessions.get(address)
        if session is not None:
            return await self._drain(session, timeout_s)
        if not self._drains.is_over(address):
            raise self._unknown(address)
        return Drained()

    async def leave(self, address: str, executor_epoch: int, timeout_s: float) -> None:
        """Drains an executor at its own wish, which GetInfo must confirm. Raises DomainError.

        Does nothing if that life of the executor is already gone.
        """
        session = self.sessions.get(address)
        is_here = session is not None and session.info.executor_epoch == executor_epoch
        if session is None or not is_here or self._is_closed:
            return
        try:
            is_draining = await session.link.is_draining(VERIFY_TIMEOUT_S)
        except ExecutorLost as lost:
            raise DomainError("EXECUTOR_UNREACHABLE", f"{address}: {lost}") from lost
        if not is_draining:
            message = f"GetInfo at {address} does not report draining"
            raise DomainError("EXECUTOR_MISMATCH", message)
        if self.sessions.get(address) is session:
            await self._drain(session, timeout_s, is_own_wish=True)

    def undrain(self, address: str, num_moved: int) -> None:
        """Takes back an executor that drains or was drained. Raises DomainError.

        `num_moved`: requests that were moved to other executors during the drain.
        """
        if address in self.sessions:
            if self._drains.undo(address, num_moved):
                _log.info("executor_stays address=%s", address)
                self._report(events.ExecutorUndrained(address), None)
        elif not self._drains.welcome(address):
            raise self._unknown(address)

    def _unknown(self, address: str) -> DomainError:
        known = ", ".join(self.sessions)[:_SHOWN_CHARS] or "none"
        message = f"no executor at {address[:_SHOWN_CHARS]!r}; known: {known}"
        return DomainError("EXECUTOR_UNKNOWN", message)

    async def _drain(
        self, session: ExecutorSession, timeout_s: float, *, is_own_wish: bool = False
    ) -> Drained:
        over, is_new = self._drains.begin(
            session.info, timeout_s, self._drain_expired, is_own_wish=is_own_wish
        )
        if is_new:
            _log.info("executor_leaving address=%s timeout_s=%g", session.address, timeout_s)
            self._report(events.ExecutorDraining(session.address), None)
        drained = await over
        if drained.is_undone:
            message = f"the drain of the executor at {session.address} was undone"
            raise DomainError("DRAIN_UNDONE", message)
        if session.task is not None:
            await asyncio.wait({session.task})
        return drained

    def _drain_expired(self, address: str) -> None:
        self._report(events.ExecutorDrainExpired(address), None)

    # -- Serving and loss ----------------------------------------------------------------------

    async def _run(self, session: ExecutorSession) -> None:
        """Runs a session until its executor is lost or removed; reports the loss."""
        try:
            if not self.tokenizer_files:
                self.tokenizer_files = await session.link.tokenizer_files()
            if self.sessions.get(session.address) is not session:
                return
            session.is_connected = self._has_served = True
            self._report(events.ExecutorConnected(session.address), None)
            await session.run()
        except ExecutorLost as lost:
            self._lost(session, lost.cause, str(lost))
        except Exception:
            # A bug of ours costs this executor's requests a recompute, but the service goes on.
            _log.exception("engine_loop_failed address=%s", session.address)
            self._lost(session, LossCause.DIED, "the engine loop failed")
        finally:
            await session.link.close()

    def _lost(self, session: ExecutorSession, cause: LossCause, why: str) -> None:
        if self.sessions.get(session.address) is session:
            self._report(events.ExecutorLost(session.address, cause, why), None)

    def removed(self, gone: ExecutorGone) -> None:
        """Ends the session of an executor that the scheduler has removed."""
        session = self.sessions.pop(gone.address)
        session.life.last_step_id = gone.last_step_id
        session.closed()
        self._pulse.forget(gone.address)
        self._signs_of_life.forget(gone.address)
        self._drains.gone(gone.address, num_moved=gone.num_moved, is_lost=not gone.is_drained)
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()
        if not self._has_served and not self.sessions:
            self._accepted_model = None

    async def close(self) -> None:
        """Ends all calls to executors; no executor is taken in afterwards."""
        self._is_closed = True
        await self._tasks.close()
        await self._idle_checks.close()
