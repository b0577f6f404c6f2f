"""A recorded scheduler at work: random requests, failures and losses, all drawn from one seed."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from executor_service.service.decode_batch import decode_batch
from executor_service.service.encode_answer import encode_answer
from executor_service.steps.step import StepInput
from executor_service.steps.step_executor import StepExecutor
from scheduler_service.journal.journal import FileJournal, Journal
from scheduler_service.journal.segment_file import SegmentFile
from scheduler_service.scheduler import effects, events
from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.scheduler import Scheduler
from scheduler_service.scheduler.values.config import Feature, FleetConfig, SchedulerConfig
from scheduler_service.scheduler.values.plan import StepOutcome, StepPlan, StepStatus
from scheduler_service.scheduler.values.request import Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import BeamParams, Grammar, SamplingParams
from scheduler_service.step_codec import EncodedBatch, ReceivedResult, decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.scheduler.v1 import journal_pb2
from splitserve_rpc.domain_error import DomainError
from tests.support.core.driver import make_config
from tests.support.core.in_process import SCHEDULER_EPOCH, executor_info
from tests.support.fakes.fake_runner import FakeRunner, StepFault
from tests.support.fakes.slow_compiler import SlowCompiler

VOCAB_SIZE = 97
STEP_NS = 1_000_000
# The last one cannot be compiled.
_GRAMMARS = (
    Grammar("json_schema", ("a rule",)),
    Grammar("choices", ("5 6 7 8", "5 6", "12")),
    Grammar("lark", ("!",)),
)


def run_config(**options: object) -> SchedulerConfig:
    """Small pools, so that everything happens."""
    values: dict[str, object] = {
        "num_device_blocks": 24,
        "num_host_blocks": 16,
        "block_bytes": 4096,
        "max_num_batched_tokens": 40,
        "max_model_len": 80,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset({96}),
        "features": frozenset(Feature),
        "max_adapters": 2,
    }
    return make_config(**(values | options))


def plain_request(number: int, max_tokens: int = 10) -> Request:
    """Asks for `max_tokens` tokens after a prompt of its own."""
    params, prompt = SamplingParams(max_tokens=max_tokens), [number % VOCAB_SIZE, 2, 3]
    request = Request.create(f"r{number}", prompt, params, arrival=number, seed=number)
    request.client_key = number
    return request


def open_file(path: Path, max_bytes: int = 2**26) -> FileJournal:
    """A journal of a scheduler."""
    return FileJournal(path, max_bytes)


class RecordedExecutor:
    """One life of an executor of a recorded scheduler. It answers when it is told to.

    `is_sick`: whether all its steps fail.
    """

    def __init__(self, config: SchedulerConfig, address: str, epoch: int) -> None:
        self.address = address
        self.epoch = epoch
        self.is_sick = False
        self.in_flight: deque[tuple[StepPlan, bytes]] = deque()
        self._faults: deque[StepFault] = deque()
        self._compiler = SlowCompiler(num_asks=8)
        runner = FakeRunner(
            block_size=config.block_size,
            num_device_blocks=config.num_device_blocks,
            num_host_blocks=config.num_host_blocks,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            sliding_window_tokens=config.sliding_window,
            fault=self._fault,
            us_per_block=3,
            us_per_token=0 if config.speculates else 5,
        )
        if config.speculates:
            # There is something to guess, and a pass takes the same for more tokens.
            runner.num_words = 2
        self._executor = StepExecutor(executor_info(config, epoch), runner)

    def execute(self, message: bytes, fault: StepFault | None = None) -> pb.StepResult:
        """Executes an encoded batch."""
        if fault is not None:
            self._faults.append(fault)
        answer = self._executor.execute(decode_batch(pb.ScheduleBatch.FromString(message)))
        return pb.StepResult.FromString(encode_answer(answer).SerializeToString())

    def _fault(self, step: StepInput) -> StepFault:
        return self._faults.popleft() if self._faults else self._compiler(step)


class RecordedScheduler:
    """A scheduler with a journal, and executors; stands for the driver, without an event loop."""

    def __init__(
        self,
        journal: Journal,
        config: SchedulerConfig | None = None,
        fleet: FleetConfig = FleetConfig(),  # noqa: B008
    ) -> None:
        self.config = config or run_config()
        self.scheduler = Scheduler(fleet)
        self.executors: dict[str, RecordedExecutor] = {}
        self.now_ns = 0
        self.wakes_at_ns: int | None = None
        # Of executors that are gone, to go on from.
        self.last_step_ids: dict[tuple[str, int], int] = {}
        self._journal = journal
        journal.begin(self.scheduler, fleet)

    def handle(
        self, event: events.Event, received: ReceivedResult | None = None
    ) -> list[effects.Effect]:
        """Passes an event in, and executes its effects."""
        record = self._journal.record(event, self.now_ns, received)
        try:
            found = self.scheduler.handle(event, self.now_ns)
        except Exception as error:
            record.raised(error)
            raise
        batches = [self._send(each) for each in found if isinstance(each, effects.SendStep)]
        record.done(found, batches)
        for effect in found:
            if isinstance(effect, effects.WakeAt):
                self.wakes_at_ns = effect.at_ns
            elif isinstance(effect, effects.ExecutorGone):
                self._forget(effect)
        return found

    def join(self, executor: RecordedExecutor) -> None:
        """An executor registers and answers, perhaps one that was given up."""
        executor.in_flight.clear()
        life = executor.address, executor.epoch
        joined = events.ExecutorJoined(
            executor.address,
            executor.epoch,
            self.config,
            num_credits=2,
            last_step_id=self.last_step_ids.get(life, 0),
            scheduler_epoch=SCHEDULER_EPOCH,
        )
        self.handle(joined)
        self.executors[executor.address] = executor
        self.handle(events.ExecutorConnected(executor.address))

    def start(self, address: str = "executor:1", epoch: int = 1) -> RecordedExecutor:
        """A new executor joins."""
        executor = RecordedExecutor(self.config, address, epoch)
        self.join(executor)
        return executor

    def submit(self, request: Request) -> None:
        """Raises DomainError if the scheduler refuses the request."""
        self.scheduler.check(request)
        self.handle(events.RequestSubmitted(request))

    def tick_if_due(self) -> None:
        """Sends the ticks that the scheduler asked for by now."""
        while self.wakes_at_ns is not None and self.wakes_at_ns <= self.now_ns:
            self.wakes_at_ns = None
            self.handle(events.Tick())

    def pass_time(self) -> None:
        """Lets it be as late as the scheduler asked to be woken at."""
        if self.wakes_at_ns is not None:
            self.now_ns = max(self.now_ns, self.wakes_at_ns)
        self.tick_if_due()

    def answer(self, executor: RecordedExecutor, fault: StepFault | None = None) -> None:
        """Executes the oldest step in flight."""
        plan, message = executor.in_flight.popleft()
        self._receive(executor, plan, executor.execute(message, fault))

    def skip(self, executor: RecordedExecutor) -> None:
        """The oldest step in flight is not executed."""
        plan, _ = executor.in_flight.popleft()
        status = pb.STEP_STATUS_NEED_SNAPSHOT
        if plan.base_step_id is None:
            status = pb.STEP_STATUS_REFUSED
        self._receive(executor, plan, pb.StepResult(step_id=plan.step_id, status=status))

    def refuse(self, executor: RecordedExecutor) -> None:
        """The oldest step in flight was too large to be sent."""
        plan, _ = executor.in_flight.popleft()
        outcome = StepOutcome(plan.step_id, StepStatus.REFUSED)
        self.handle(events.StepCompleted(executor.address, outcome, was_sent=False))

    def run(self, max_turns: int = 10_000) -> None:
        """Runs until all requests have ended."""
        for _ in range(max_turns):
            self.tick_if_due()
            busy = [each for each in self.executors.values() if each.in_flight]
            if not self.scheduler.places and not busy:
                return
            for executor in busy:
                if executor.in_flight:
                    self.answer(executor)
            if not busy:
                self.pass_time()
        raise AssertionError(f"still running: {list(self.scheduler.places)}")

    def _receive(self, executor: RecordedExecutor, plan: StepPlan, result: pb.StepResult) -> None:
        num_rows = len(plan.work.row_ids)
        outcome = decode_result(result, num_rows)
        completed = events.StepCompleted(executor.address, outcome)
        self.handle(completed, ReceivedResult(result, num_rows))

    def _send(self, effect: effects.SendStep) -> EncodedBatch:
        executor = self.executors[effect.address]
        batch = encode_plan(
            effect.plan, scheduler_epoch=SCHEDULER_EPOCH, executor_epoch=executor.epoch
        )
        executor.in_flight.append((effect.plan, batch.data))
        return batch

    def _forget(self, gone: effects.ExecutorGone) -> None:
        self.last_step_ids[gone.address, gone.epoch] = gone.last_step_id
        if self.executors[gone.address].epoch == gone.epoch:
            del self.executors[gone.address]


class RandomRun:
    """A scheduler with executors of one `config`, and whatever happens to them.

    `disturbed_ratio`: how often an executor is lost, drained or doubted, or the like. `is_watched`:
    whether somebody asks the scheduler all that it can be asked, now and then.
    """

    def __init__(
        self,
        journal: Journal,
        config: SchedulerConfig,
        seed: int,
        *,
        num_executors: int = 2,
        disturbed_ratio: float = 0.1,
        is_watched: bool = False,
    ) -> None:
        fleet = FleetConfig(
            queue_policy=config.queue_policy,
            tenant_weights=config.tenant_weights,
            max_num_waiting=8,
            max_executor_losses=1,
            executor_return_s=0.05,
        )
        self._recorded = RecordedScheduler(journal, config, fleet)
        self._random = random.Random(seed)
        self._disturbed_ratio = disturbed_ratio
        self._is_watched = is_watched
        self._epoch = 0
        self._num_requests = 0
        self._addresses = [f"executor:{number}" for number in range(num_executors)]
        # Executors that were given up, which may come back.
        self._given_up: dict[str, RecordedExecutor] = {}
        for address in self._addresses:
            self._start(address)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler itself."""
        return self._recorded.scheduler

    @property
    def now_ns(self) -> int:
        """The time of the latest event."""
        return self._recorded.now_ns

    def run(self, num_turns: int, *, to_the_end: bool = True) -> None:
        """In each turn something happens to each executor; `to_the_end`: then all requests end."""
        for turn in range(num_turns):
            if self._is_watched and turn % 3:
                _look_at(self.scheduler)
            for address in self._addresses:
                self._recorded.now_ns += STEP_NS
                self._recorded.tick_if_due()
                executor = self._recorded.executors.get(address)
                if executor is None:
                    self._come_back(address)
                else:
                    self._happen(executor)
        if to_the_end:
            self._heal()
            self._recorded.run()

    def _start(self, address: str) -> None:
        self._epoch += 1
        self._recorded.start(address, self._epoch)

    def _come_back(self, address: str) -> None:
        """The executor that was there, a new one, or nobody yet."""
        what = self._random.random()
        if what < 0.3 and address in self._given_up:
            self._recorded.join(self._given_up.pop(address))
        elif what < 0.6:
            self._start(address)

    def _heal(self) -> None:
        for address in self._addresses:
            executor = self._recorded.executors.get(address)
            if executor is None:
                self._start(address)
                continue
            executor.is_sick = False
            self._recorded.handle(events.ExecutorUndrained(address))
            self._recorded.handle(events.ExecutorDoubted(address, is_doubtful=False))

    def _happen(self, executor: RecordedExecutor) -> None:
        what = self._random.random()
        if what < 0.25:
            self._arrive()
        elif what < 0.28:
            number = self._random.randint(1, self._num_requests + 1)
            self._recorded.handle(events.RequestAborted(f"r{number}"))
        elif what < 0.28 + self._disturbed_ratio:
            self._disturb(executor)
        elif executor.in_flight:
            self._answer(executor)

    def _disturb(self, executor: RecordedExecutor) -> None:
        draw, recorded, address = self._random, self._recorded, executor.address
        match draw.randint(0, 9):
            case 0 | 1:
                self._given_up[address] = executor
                cause = draw.choice([LossCause.DIED, LossCause.SILENT])
                recorded.handle(events.ExecutorLost(address, cause, "the test asked for it"))
            case 2:
                self._start(address)
            case 3:
                recorded.handle(events.ExecutorDraining(address))
            case 4:
                recorded.handle(events.ExecutorDrainExpired(address))
            case 5:
                recorded.handle(events.ExecutorUndrained(address))
            case 6:
                is_doubtful = draw.random() < 0.5
                recorded.handle(events.ExecutorDoubted(address, is_doubtful=is_doubtful))
            case 7:
                executor.is_sick = not executor.is_sick
            case 8:
                weights = draw.choice([{}, {"a": 2.0}, {"a": 0.5, "b": 3.0}])
                recorded.handle(events.TenantsWeighed(weights))
            case _:
                recorded.pass_time()
                recorded.handle(events.Tick(looks_everywhere=True))

    def _answer(self, executor: RecordedExecutor) -> None:
        what = 0.0 if executor.is_sick else self._random.random()
        if what < 0.03:
            fault = StepFault(error=RuntimeError("a fault that the test asked for"))
            self._recorded.answer(executor, fault)
        elif what < 0.05:
            self._recorded.skip(executor)
        elif what < 0.06:
            self._recorded.refuse(executor)
        else:
            self._recorded.answer(executor)

    def _arrive(self) -> None:
        self._num_requests += 1
        number, draw = self._num_requests, self._random
        params = self._params()
        resumed: list[list[int]] = []
        if params.is_streamed and draw.random() < 0.2:
            resumed = [[5, 6, 7][: draw.randint(0, 3)] for _ in range(params.num_sequences)]
        encoder = [8] * draw.randint(1, 6) if draw.random() < 0.1 else None
        request = Request.create(
            f"r{number}",
            self._prompt(),
            params,
            arrival=number,
            seed=number,
            resume_token_ids=resumed,
            scheduling=self._scheduling(),
            encoder_token_ids=encoder,
        )
        request.client_key = number
        with suppress(DomainError):
            self._recorded.submit(request)

    def _prompt(self) -> list[int]:
        draw = self._random
        shared = [1 + position for position in range(draw.choice([0, 4, 9, 20]))]
        return shared + [draw.randint(0, VOCAB_SIZE - 2) for _ in range(draw.randint(1, 14))]

    def _params(self) -> SamplingParams:
        draw = self._random
        max_tokens = draw.choice([None, 1, 7, 20])
        if draw.random() < 0.15:
            beam = BeamParams(draw.randint(1, 3), length_penalty=0.7)
            return SamplingParams(beam=beam, max_tokens=max_tokens, min_tokens=draw.randint(0, 1))
        n = draw.choice([1, 1, 1, 2, 3])
        grammar = draw.choice([None, None, None, *_GRAMMARS])
        return SamplingParams(
            temperature=draw.choice([0.0, 0.7]),
            top_k=draw.choice([None, 5]),
            repetition_penalty=draw.choice([1.0, 1.1]),
            logit_bias=draw.choice([{}, {3: 1.5, 40: -2.0, 7: 0.25}, {3: -math.inf}]),
            allowed_token_ids=frozenset(draw.choice([(), (), range(0, VOCAB_SIZE, 2)])),
            bad_words_token_ids=draw.choice([(), (), ((5,), (6, 8), (10, 12, 10))]),
            max_tokens=max_tokens,
            min_tokens=0 if grammar else draw.randint(0, 1),
            stop_token_ids=frozenset(draw.choice([(), (11, 50)])),
            num_logprobs=draw.choice([None, None, 2]),
            num_prompt_logprobs=draw.choice([None, None, 1]),
            n=n,
            best_of=draw.choice([None, None, n + 1]),
            grammar=grammar,
        )

    def _scheduling(self) -> SchedulingParams:
        draw = self._random
        return SchedulingParams(
            priority=draw.randint(-1, 1),
            tenant=draw.choice(["", "a", "b"]),
            deadline_ns=draw.choice([None, None, self.now_ns + 40 * STEP_NS]),
            adapter=draw.choice(["", "", "", "x", "y", "z"]),
            cache_salt=draw.choice(["", "", "salt"]),
            uses_prefix_cache=draw.random() < 0.9,
        )


def _look_at(scheduler: Scheduler) -> None:
    """Asks all that metrics, readiness and the live view ask."""
    for name, member in vars(Scheduler).items():
        if isinstance(member, property):
            getattr(scheduler, name)
    scheduler.heads()
    scheduler.first_waiting(3)


def write_entries(path: Path, entries: Iterable[journal_pb2.JournalEntry]) -> None:
    """Writes a journal of these entries."""
    file = SegmentFile(path)
    for entry in entries:
        file.write(entry.SerializeToString())
    file.close()
