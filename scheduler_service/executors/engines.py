"""The executors: who joins, whose life goes on, who leaves, and who is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.planning.arrival_checks import check_request, fits
from scheduler_service.core.request import Request
from scheduler_service.executors.answer_watch import AnswerWatch, FleetPulse
from scheduler_service.executors.applicants import VERIFY_TIMEOUT_S, Applicants
from scheduler_service.executors.drains import Drained, Drains
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.engine_news import EngineNews
from scheduler_service.executors.engine_parts import EngineOwner, EngineParts
from scheduler_service.executors.executor_link import ExecutorLost, Link, LinkConfig
from scheduler_service.executors.handshake import check_model, epoch_for, measured_step
from scheduler_service.executors.idle_checks import IdleChecks
from scheduler_service.executors.lives import Life, Lives
from scheduler_service.executors.step_alarm import StepAlarm
from scheduler_service.executors.tasks import Tasks
from scheduler_service.fleet.executor_losses import LossCause
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.peer_watch import TICK_S, PeerState

_DRAINED = "it was drained"
_SHOWN_CHARS = 200
# Who lives says something within two seconds, if only to be asked; who fell silent does not.
_LATELY_NS = 2_500_000_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Speech:
    """With an executor: the life that is spoken to, its steps, and as whom."""

    life: Life
    steps: StepAlarm
    scheduler_epoch: int


@dataclass(slots=True)
class _Member:
    engine: EngineLoop
    config: SchedulerConfig
    life: Life
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Expected:
    """Configuration of an executor that left, kept until `alarm` rings."""

    config: SchedulerConfig
    alarm: asyncio.TimerHandle


class Engines:
    """One engine for each executor, by address.

    `model`, `tokenizer_files`, `config`: what the executors serve, once one was connected; None or
    empty before. The model stays the same as long as this process lives, whoever comes and goes.
    """

    def __init__(self, parts: EngineParts, owner: EngineOwner) -> None:
        self._parts = parts
        self._owner = owner
        self._members: dict[str, _Member] = {}
        self._tasks = Tasks()
        config = parts.config
        self._lives = Lives(config.step_patience_s, config.step_timeout_s)
        self._pulse = FleetPulse()
        # When each said anything at all: it may hang in a step even so.
        self._signs_of_life = FleetPulse()
        self._idle_checks = IdleChecks(self._pulse, parts.now_ns, lambda: self.known)
        self._news = EngineNews(parts.audit)
        self._accepted_model: executor.ModelInfo | None = None
        self._last_config: SchedulerConfig | None = None
        self._expected: list[_Expected] = []
        self._is_closed = False
        self._drains = Drains(owner.gave_back, self._remove_drained)
        self._applicants = Applicants(self._drains, config.step_patience_s)
        self.tokenizer_files: dict[str, bytes] = {}

    @property
    def known(self) -> list[EngineLoop]:
        """All engines, in order of registration."""
        return [member.engine for member in self._members.values()]

    @property
    def taking_requests(self) -> list[EngineLoop]:
        """Those that may be given requests."""
        return [engine for engine in self.known if engine.takes_requests]

    @property
    def num_steps_answered(self) -> int:
        """By all executors that ever were here."""
        return self._pulse.num_steps

    @property
    def step_allowed_s(self) -> float:
        """How long it may be until some step is answered, if there is something to do."""
        allowed_s = (member.engine.steps.watch.allowed_s for member in self._members.values())
        return max(allowed_s, default=0.0) or self._parts.config.step_patience_s

    @property
    def model(self) -> executor.ModelInfo | None:
        """The model clients are served."""
        return self._accepted_model if self._last_config is not None else None

    @property
    def config(self) -> SchedulerConfig | None:
        """Of the connected core that takes the longest sequences, or of the last that joined."""
        return max(self._connected, key=lambda config: config.max_len, default=self._last_config)

    @property
    def max_num_seqs(self) -> int:
        """Most sequences side by side that a connected core takes, or the last that joined."""
        last = 0 if self._last_config is None else self._last_config.max_num_seqs
        return max((config.max_num_seqs for config in self._connected), default=last)

    def check(self, request: Request) -> None:
        """Raises DomainError unless an executor can run a request that is here or expected back.

        One rule for requests that are new and for those that wait. An executor is expected back for
        `executor_return_s` after it left. Where none is here or expected, the last one that joined
        stands for those to come.
        """
        here = [m.config for m in self._members.values() if m.engine.takes_requests]
        draining = [m.config for m in self._members.values() if not m.engine.takes_requests]
        configs = [*here, *draining, *(each.config for each in self._expected)]
        fitting = next((config for config in configs if fits(request, config)), None)
        for config in [fitting] if fitting is not None else here:
            check_request(request, config)
        if fitting is None and (largest := self.config) is not None:
            check_request(request, largest)

    @property
    def _connected(self) -> list[SchedulerConfig]:
        return [
            member.config
            for member in self._members.values()
            if member.engine.is_connected and not member.engine.is_draining
        ]

    # -- joining -------------------------------------------------------------------------------

    async def join(self, info: executor.ExecutorInfo, target: str | None = None) -> None:
        """Takes the executor that answers at `target`, if it is what `info` says.

        `target`: what stands for `info.address`, None: that itself. One that does not answer is not
        taken, and may register again. Raises DomainError.
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
            self._parts.config.reconnect_timeout_s,
            self._parts.config.step_timeout_s,
            target,
            lambda is_cut: steps.connected(is_cut=is_cut),
            lambda state, quiet_s: self._look(info, steps, state, quiet_s),
        )
        link, is_taken = self._parts.connect(info, config), False
        try:
            answer = await self._applicants.ask(info, link, life)
            check_model(info, self._accepted_model)  # somebody may have joined meanwhile
            if answer is not None and not self._is_known(info) and not self._is_closed:
                epoch = epoch_for(answer, self._parts.scheduler_epoch)
                self._take(info, link, _Speech(life, steps, epoch))
                is_taken = True
        finally:
            if not is_taken:
                await link.close()

    def _look(
        self, info: executor.ExecutorInfo, steps: StepAlarm, state: PeerState, quiet_s: float
    ) -> bool:
        """Records whether an executor answers; returns whether it may be given up if silent.

        The last that is there is not, nor are all of them if it is this side that hears nothing.
        """
        if not self._is_known(info):
            return False
        now_ns, is_silent = self._parts.now_ns(), state is PeerState.SILENT
        if quiet_s <= TICK_S:
            self._signs_of_life.show(info.address, now_ns)
        if is_silent and not steps.watch.is_silent:
            _log.warning("executor_silent address=%s quiet_s=%.3g", info.address, quiet_s)
        steps.silent(is_silent=is_silent)
        return self._signs_of_life.is_another_alive(info.address, now_ns - _LATELY_NS)

    def _is_known(self, info: executor.ExecutorInfo) -> bool:
        member = self._members.get(info.address)
        epoch = info.executor_epoch
        return member is not None and member.engine.link.info.executor_epoch == epoch

    def _steps_of(self, info: executor.ExecutorInfo, life: Life) -> StepAlarm:
        return StepAlarm(
            AnswerWatch(info.address, life.patience, self._pulse),
            self._parts.now_ns,
            block_size=info.block_size_tokens,
            ask_others=lambda: self._idle_checks.begin(info.address),
            recovered=self._owner.joined,
        )

    def _take(self, info: executor.ExecutorInfo, link: Link, speech: _Speech) -> None:
        """Raises DomainError if no core can be made for it; then nothing has changed."""
        config, core = self._parts.make_core(info, speech.life.last_step_id, speech.scheduler_epoch)
        engine = EngineLoop(
            core,
            link,
            self._owner.deliver,
            self._owner.refill,
            self._owner.judge,
            speech.steps,
            self._parts.observer,
            scheduler_epoch=speech.scheduler_epoch,
            pipeline_depth=self._parts.config.pipeline_depth,
            now_ns=self._parts.now_ns,
        )
        known = self._members.get(info.address)
        if known is not None:
            self._remove(known.engine, "a new executor answers at its address")
        self._accepted_model = info.model
        self._lives.keep(info.address, speech.life)
        member = self._members[info.address] = _Member(engine, config, speech.life)
        member.task = self._tasks.begin(self._run(member))

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """For executors that join from now on."""
        config = self._parts.config
        policies = replace(config.policies, tenant_weights=weights)
        self._parts = replace(self._parts, config=replace(config, policies=policies))

    # -- leaving -------------------------------------------------------------------------------

    async def drain(self, address: str, timeout_s: float) -> Drained:
        """Sends an executor away, and returns when it is gone. Raises DomainError.

        Cancelling this changes nothing.
        """
        member = self._members.get(address)
        if member is not None:
            return await self._drain(member, timeout_s)
        if not self._drains.is_over(address):
            raise self._unknown(address)
        return Drained()

    async def leave(self, address: str, executor_epoch: int, timeout_s: float) -> None:
        """As `drain`, for an executor that wants it, and says so when it is asked.

        Nothing to do for one that is gone. Raises DomainError.
        """
        member = self._members.get(address)
        is_here = member is not None and member.engine.link.info.executor_epoch == executor_epoch
        if member is None or not is_here or self._is_closed:
            return
        try:
            is_draining = await member.engine.link.is_draining(VERIFY_TIMEOUT_S)
        except ExecutorLost as lost:
            raise DomainError("EXECUTOR_UNREACHABLE", f"{address}: {lost}") from lost
        if not is_draining:
            message = f"GetInfo at {address} does not say that it drains"
            raise DomainError("EXECUTOR_MISMATCH", message)
        if self._members.get(address) is member:
            await self._drain(member, timeout_s, is_own_wish=True)

    def undrain(self, address: str) -> None:
        """Takes an executor back that was sent away. Raises DomainError."""
        member = self._members.get(address)
        if member is not None:
            if self._drains.undo(member.engine):
                self._owner.joined()
        elif not self._drains.welcome(address):
            raise self._unknown(address)

    def _unknown(self, address: str) -> DomainError:
        known = ", ".join(self._members)[:_SHOWN_CHARS] or "none"
        message = f"no executor at {address[:_SHOWN_CHARS]!r}; known: {known}"
        return DomainError("EXECUTOR_UNKNOWN", message)

    async def _drain(
        self, member: _Member, timeout_s: float, *, is_own_wish: bool = False
    ) -> Drained:
        drained = await self._drains.begin(member.engine, timeout_s, is_own_wish=is_own_wish)
        if drained.is_undone:
            address = member.engine.link.info.address
            raise DomainError("DRAIN_UNDONE", f"the executor at {address} was taken back")
        if member.task is not None:
            await asyncio.wait({member.task})
        return drained

    def request_ended(self, engine: EngineLoop) -> None:
        """One that `engine` had is over."""
        self._drains.request_ended(engine)

    # -- its life ------------------------------------------------------------------------------

    async def _run(self, member: _Member) -> None:
        """Lives as long as the executor; then its requests move."""
        engine = member.engine
        info = engine.link.info
        try:
            if not self.tokenizer_files:
                self.tokenizer_files = await engine.link.tokenizer_files()
            self._news.joined(info)
            self._last_config = member.config
            self._expect_no_longer(member.config)
            engine.is_withdrawn = engine.is_failing = self._owner.is_withdrawn(engine.life)
            engine.is_connected = True
            self._owner.joined()
            await engine.run()
        except ExecutorLost as lost:
            self._remove(engine, str(lost), lost.cause)
        except Exception:
            # A fault of ours costs this executor a recompute, not the service its life.
            _log.exception("engine_loop_failed address=%s", info.address)
            self._remove(engine, "its engine loop failed")
        finally:
            await engine.link.close()

    def withdraw(self, engine: EngineLoop, why: str) -> None:
        """Closes an engine whose results are wrong: its executor joins again, with empty caches."""
        self._remove(engine, why, LossCause.WITHDRAWN)

    def _remove_drained(self, engine: EngineLoop) -> None:
        self._remove(engine, _DRAINED, LossCause.BLAMELESS)

    def _remove(self, engine: EngineLoop, why: str, cause: LossCause = LossCause.DIED) -> None:
        """Closes an engine and ends its call, unless that was done before."""
        info = engine.link.info
        member = self._members.get(info.address)
        if member is None or member.engine is not engine:
            return
        del self._members[info.address]
        engine.is_connected = False
        # Should this life of it come back, its steps are numbered on.
        member.life.last_step_id = engine.scheduler.last_step_id
        if self._last_config is not None:
            self._expect(member.config)
        self._pulse.forget(info.address)
        self._signs_of_life.forget(info.address)
        requests = engine.evacuate()
        self._drains.gone(engine, is_lost=why != _DRAINED)
        if why == _DRAINED:
            self._news.drained(info)
        elif cause is LossCause.WITHDRAWN:
            self._news.withdrawn(info, len(requests), why)
        else:
            self._news.lost(info, len(requests), why)
        if member.task is not None and member.task is not asyncio.current_task():
            member.task.cancel()
        if self._last_config is None and not self._members:
            self._accepted_model = None  # it never served anybody
        self._owner.lost(engine, requests, cause)

    def _expect(self, config: SchedulerConfig) -> None:
        """Keeps requests waiting for an executor like `config` for `executor_return_s`."""
        self._expect_no_longer(config)
        delay_s = self._parts.config.executor_return_s
        alarm = asyncio.get_running_loop().call_later(delay_s, self._give_up_expecting, config)
        self._expected.append(_Expected(config, alarm))

    def _give_up_expecting(self, config: SchedulerConfig) -> None:
        self._expect_no_longer(config)
        self._owner.not_expected()

    def _expect_no_longer(self, config: SchedulerConfig) -> None:
        for expected in [each for each in self._expected if each.config == config]:
            expected.alarm.cancel()
            self._expected.remove(expected)

    async def close(self) -> None:
        """Ends all calls, and takes nobody any more."""
        self._is_closed = True
        for expected in self._expected:
            expected.alarm.cancel()
        await self._tasks.close()
        await self._idle_checks.close()
