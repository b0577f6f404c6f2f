"""A driver whose executors answer when the test says: one event loop, no sockets, no threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

from executor_service.service import decode_batch, encode_answer, encode_info
from executor_service.steps import RowStatus, StepExecutor, StepInput
from scheduler_service.callers import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.executors import Drained, ExecutorLost, LinkConfig
from scheduler_service.journal import Journal
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler import Effect, Event, RequestSubmitted, Scheduler, Tick
from scheduler_service.scheduler.values import (
    FleetConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
)
from scheduler_service.step_codec import EncodedBatch
from scheduler_service.streams import RequestSink, SessionStream
from scheduler_service.watching import (
    Life,
    LifeEvent,
    LifeKind,
    LifeRecorder,
    Submission,
    Transition,
    Watcher,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.scheduler.v1 import scheduler_pb2 as api
from tests.support.core.driver import make_config
from tests.support.core.in_process import executor_info
from tests.support.fakes.fake_runner import FakeRunner, StepFault, no_fault

VOCAB_SIZE = 97
CONFIG = make_config(
    vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(), max_num_seqs=4, num_device_blocks=24
)


class Machine:
    """An executor at an address, life after life. `link`: the scheduler's latest way to it."""

    def __init__(
        self,
        address: str,
        guilty: int | None = None,
        *,
        guilty_rows: int | None = None,
        config: SchedulerConfig = CONFIG,
        epoch: int = 1,
        **changes: object,
    ) -> None:
        """Creates the executor. `guilty`: steps with a request of a multiple of it as number fail.

        `guilty_rows`: so do rows alone. `changes`: fields of `config` that have other values.
        """
        self.config = replace(config, **changes)  # type: ignore[arg-type]
        self.address = address
        self._guilty, self._guilty_rows = guilty, guilty_rows
        # What becomes of every step, or of every so many: an error, rows whose logits are no
        # numbers, or tokens that no vocabulary has.
        self.fails = self.is_not_a_number = self.says_no_tokens = False
        self.sick_every = 1
        self._num_steps = 0
        # The fault of steps in which nothing else fails, and that of the next step.
        self.other_fault: Callable[[StepInput], StepFault] = no_fault
        self._next_fault: StepFault | None = None
        self.epoch = epoch - 1
        self.link: BurstLink | None = None
        # Whether a scheduler sent it away, as it remembers; whether it is about to end.
        self.says_drained = False
        self.says_draining = False
        # None: as many as executors take.
        self.max_inflight_steps: int | None = None
        # The step that it has measured.
        self.trial_step: pb.TrialStep | None = None
        self.restart()

    def restart(self) -> None:
        """A new life with empty pools."""
        self.epoch += 1
        self.runner = FakeRunner(
            block_size=self.config.block_size,
            num_device_blocks=self.config.num_device_blocks,
            num_host_blocks=self.config.num_host_blocks,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            sliding_window_tokens=self.config.sliding_window,
            fault=self._fault,
        )
        self.executor = StepExecutor(executor_info(self.config, self.epoch), self.runner)

    def _fault(self, step: StepInput) -> StepFault:
        fault, self._next_fault = self._next_fault, None
        if fault is not None:
            return fault
        seeds = step.seeds.tolist()
        if self._guilty is not None and any(seed and seed % self._guilty == 0 for seed in seeds):
            return StepFault(error=RuntimeError("a request that nobody survives"))
        if self._guilty_rows is not None:
            is_bad = (step.seeds % self._guilty_rows == 0) & (step.seeds > 0) & step.samples
            if is_bad.any():
                row_ids = step.row_ids[is_bad].tolist()
                return StepFault(rows=dict.fromkeys(row_ids, RowStatus.INVALID_LOGITS))
        self._num_steps += 1
        if self._num_steps % self.sick_every:
            return self.other_fault(step)
        if self.fails:
            return StepFault(error=RuntimeError("the device is broken"))
        if self.is_not_a_number:
            row_ids = step.row_ids[step.samples].tolist()
            return StepFault(rows=dict.fromkeys(row_ids, RowStatus.INVALID_LOGITS))
        return self.other_fault(step)

    def compute(self, batch: EncodedBatch, fault: StepFault | None = None) -> pb.StepResult:
        """Executes a batch at once. `fault`: what fails in it."""
        self._next_fault = fault
        result = encode_answer(
            self.executor.execute(decode_batch(pb.ScheduleBatch.FromString(batch.data)))
        )
        if self.says_no_tokens:
            result.sampled_token_ids = (len(result.sampled_token_ids) // 4) * b"\xff\xff\xff\x7f"
        return result

    @property
    def info(self) -> pb.ExecutorInfo:
        """Registration of the executor."""
        info = encode_info(executor_info(self.config, self.epoch))
        info.address, info.model.digest = self.address, "d" * 64
        if self.max_inflight_steps is not None:
            info.limits.max_inflight_steps = self.max_inflight_steps
        if self.trial_step is not None:
            info.trial_step.CopyFrom(self.trial_step)
        return info


class BurstLink:
    """Stands for an ExecutorLink. Batches are executed at once, results come when `release`d."""

    def __init__(self, machine: Machine, info: pb.ExecutorInfo) -> None:
        self.info = info
        self.held: list[pb.StepResult] = []
        self._machine = machine
        self._arrived: asyncio.Queue[pb.StepResult | None] = asyncio.Queue()
        machine.link = self

    def send(self, batch: EncodedBatch) -> None:
        """See Link."""
        self.held.append(self._machine.compute(batch))

    def release(self, change: Callable[[pb.StepResult], None] | None = None) -> None:
        """The oldest result comes in."""
        if self.held:
            result = self.held.pop(0)
            if change is not None:
                change(result)
            self._arrived.put_nowait(result)

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> None:
        """See Link. Every adapter is loaded at once."""

    @property
    def is_silent(self) -> bool:
        """Whether no result will ever come of what was sent."""
        return not self.held and self._arrived.empty()

    def break_off(self) -> None:
        """The executor counts as lost."""
        self._arrived.put_nowait(None)

    async def get_info(self, timeout_s: float) -> pb.ExecutorInfo:
        """See Link."""
        return self._machine.info

    async def introduce(self, timeout_s: float) -> tuple[pb.ExecutorInfo, bool]:
        """See Link."""
        return await self.get_info(timeout_s), self._machine.says_drained

    async def is_draining(self, timeout_s: float) -> bool:
        """See Link."""
        return self._machine.says_draining

    async def tokenizer_files(self) -> dict[str, bytes]:
        """See Link."""
        return {"tokenizer.json": b"{}"}

    async def results(self) -> AsyncGenerator[pb.StepResult, None]:
        """See Link."""
        while (result := await self._arrived.get()) is not None:
            yield result
        raise ExecutorLost("the test lets it go")

    async def close(self) -> None:
        """See Link."""


FOREVER_S = 3600.0
MAX_TOKENS = 5
CLUSTER_CONFIG = ClusterConfig()
NO_WISHES = SchedulingParams()


async def turns() -> None:
    """Runs the event loop until nothing is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


class Fleet:
    """A driver, its executors, and one session of a client."""

    def __init__(
        self,
        config: ClusterConfig = CLUSTER_CONFIG,
        watcher: Callable[[Fleet], Watcher] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.machines: dict[str, Machine] = {}
        self.now_ns = 0
        self.cluster = Driver(
            config,
            1,
            lambda: None,
            now_ns=lambda: self.now_ns,
            journal=journal,
            watchers=() if watcher is None else (watcher(self),),
            connect=self.connect,
        )
        self.stream = SessionStream(self.cluster.delivery.new_outbox())
        self.cluster.delivery.open_stream(self.stream)

    def connect(self, info: pb.ExecutorInfo, _config: LinkConfig) -> BurstLink:
        """Returns a link to the machine at the address of `info`."""
        return BurstLink(self.machines[info.address], info)

    async def join(self, machine: Machine) -> None:
        """Registers the machine."""
        self.machines[machine.address] = machine
        await self.cluster.join(machine.info)
        await turns()

    def submit(
        self,
        *handles: int,
        scheduling: SchedulingParams = NO_WISHES,
        logit_bias: Mapping[int, float] | None = None,
    ) -> None:
        """Submits requests r1, r2 and so on, by handle, each with a different prompt."""
        for handle in handles:
            name = RequestName(f"r{handle}")
            params = SamplingParams(max_tokens=MAX_TOKENS, logit_bias=logit_bias or {})
            request = Request.create(
                name.key, [handle], params, arrival=handle, seed=handle, scheduling=scheduling
            )
            self.stream.begin(handle, name)
            self.cluster.submit(request, RequestSink(self.stream, handle), Admission(name))

    async def next_events(self) -> list[api.SessionEvent]:
        """Next events of the session, without plain tokens."""
        while True:
            data = await self.stream.outbox.get()
            assert data is not None, "nobody ended it"
            events = api.SessionResponse.FromString(data).events
            if events:
                return list(events)

    def drain(self, machine: Machine, timeout_s: float = FOREVER_S) -> asyncio.Task[Drained]:
        """Drains the executor as an operator does; ends when it has left."""
        return asyncio.create_task(self.cluster.drain_executor(machine.address, timeout_s))

    def requests_at(self, machine: Machine) -> list[str]:
        """Unfinished requests of an executor."""
        engines = {each.address: each for each in self.cluster.executors}
        return sorted(engines[machine.address].engine.unfinished_request_ids)

    async def finish(self, machine: Machine) -> None:
        """Answers all steps of an executor."""
        for _ in range(2 * MAX_TOKENS):
            if machine.link is not None:
                machine.link.release()
            await turns()


NS_PER_S = 1_000_000_000


class RecordedFleet:
    """A fleet whose requests' life events are recorded."""

    def __init__(
        self,
        config: ClusterConfig | None = None,
        num_kept: int = 10,
        journal: Journal | None = None,
    ) -> None:
        made: list[LifeRecorder] = []

        def watcher(fleet: Fleet) -> LifeRecorder:
            made.append(LifeRecorder(num_kept, lambda: fleet.now_ns))
            return made[0]

        self.fleet = Fleet(config or ClusterConfig(), watcher, journal)
        self.recorder = made[0]

    def life(self, handle: int) -> Life:
        """Life of the request whose id is r1, r2 and so on."""
        lives = [*self.recorder.living, *self.recorder.ended]
        return next(each for each in lives if each.request_id == f"r{handle}")

    def kinds(self, handle: int) -> list[str]:
        """Kinds of all events of a request."""
        return [event.kind.value for event in self.life(handle).events]

    def event(self, handle: int, kind: LifeKind) -> LifeEvent:
        """First event of this kind."""
        return next(each for each in self.life(handle).events if each.kind is kind)

    def submit_long(self, handle: int, num_tokens: int, max_tokens: int) -> None:
        """Submits a request with a prompt of `num_tokens` tokens."""
        name = RequestName(f"r{handle}")
        prompt = [handle + n for n in range(num_tokens)]
        params = SamplingParams(max_tokens=max_tokens)
        request = Request.create(name.key, prompt, params, arrival=handle, seed=handle)
        stream = self.fleet.stream
        stream.begin(handle, name)
        self.fleet.cluster.submit(request, RequestSink(stream, handle), Admission(name))

    async def release(self, machine: Machine, seconds: float = 1) -> None:
        """Answers a step after `seconds`."""
        self.fleet.now_ns += int(seconds * NS_PER_S)
        assert machine.link is not None
        machine.link.release()
        await turns()

    async def replace(self, lost: Machine, following: Machine) -> None:
        """Loses a machine with steps in flight; then another one joins."""
        assert lost.link is not None
        lost.link.break_off()
        await turns()
        await self.fleet.join(following)

    async def close(self) -> None:
        """Ends all executors and requests."""
        await self.fleet.cluster.drain(0)


_SCHEDULER = Scheduler(FleetConfig())


def transition(*effects: Effect, event: Event | None = None, now_ns: int = 0) -> Transition:
    """A transition of a scheduler without executors."""
    return Transition.of(event or Tick(), effects, now_ns, _SCHEDULER)


def submission(request: Request, name: RequestName | None = None, now_ns: int = 0) -> Transition:
    """The transition in which `request` arrives. `name`: its id by default."""
    admission = Admission(name or RequestName(request.request_id))
    event = RequestSubmitted(request)
    return Transition.of(event, (), now_ns, _SCHEDULER, 0, Submission(admission, now_ns))
