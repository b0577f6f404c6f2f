"""Cores of a journal at work: random requests, failures and losses, all drawn from one seed."""

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
from scheduler_service.core.config import Feature, SchedulerConfig
from scheduler_service.core.grammar import Grammar
from scheduler_service.core.plan import StepOutcome, StepPlan, StepStatus
from scheduler_service.core.request import Request, SchedulingParams
from scheduler_service.core.sampling_params import BeamParams, SamplingParams
from scheduler_service.journal.core import Core, look_into, step_codec
from scheduler_service.journal.journal import FileJournal, Journal
from scheduler_service.journal.segment_file import SegmentFile
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


def open_file(path: Path, max_bytes: int = 2**26) -> FileJournal:
    """A journal of the scheduler whose cores these are."""
    return FileJournal(path, max_bytes, SCHEDULER_EPOCH)


class RecordedEngine:
    """A core of a journal and an executor; the loop is that of `ExecutorState`, without clients."""

    def __init__(
        self, journal: Journal, config: SchedulerConfig, *, epoch: int = 1, depth: int = 2
    ) -> None:
        self.core = journal.core(config, 0, f"executor:{epoch}", epoch)
        self._codec = step_codec(self.core, SCHEDULER_EPOCH, epoch)
        self._depth = depth
        self._in_flight: deque[tuple[StepPlan, bytes]] = deque()
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

    def fill(self) -> bool:
        """Plans what can be planned; whether something is in flight."""
        while len(self._in_flight) < self._depth:
            plan = self.core.schedule()
            at_ns = look_into(self.core).ask_again_at_ns
            if plan is None and at_ns is not None and not self._in_flight:
                self.core.tick(at_ns)
                plan = self.core.schedule()
            self.core.take_ended()
            if plan is None:
                break
            message = self._codec.encode(plan).data
            self._in_flight.append((plan, message))
        return bool(self._in_flight)

    def answer(self, fault: StepFault | None = None) -> None:
        """Executes the oldest step in flight."""
        plan, message = self._in_flight.popleft()
        if fault is not None:
            self._faults.append(fault)
        answer = self._executor.execute(decode_batch(pb.ScheduleBatch.FromString(message)))
        self._receive(plan, encode_answer(answer))

    def skip(self) -> None:
        """The oldest step in flight is not executed."""
        plan, _ = self._in_flight.popleft()
        status = pb.STEP_STATUS_NEED_SNAPSHOT
        if plan.base_step_id is None:
            status = pb.STEP_STATUS_REFUSED
        self._receive(plan, pb.StepResult(step_id=plan.step_id, status=status))

    def refuse(self) -> None:
        """The oldest step in flight was too large to be sent."""
        plan, _ = self._in_flight.popleft()
        self.core.apply(StepOutcome(plan.step_id, StepStatus.REFUSED))

    def _receive(self, plan: StepPlan, result: pb.StepResult) -> None:
        received = pb.StepResult.FromString(result.SerializeToString())
        self.core.apply(self._codec.decode(received, len(plan.work.row_ids)))

    def _fault(self, step: StepInput) -> StepFault:
        return self._faults.popleft() if self._faults else self._compiler(step)


class RandomRun:
    """`num_engines` cores with the same `config`, and whatever happens to them."""

    def __init__(
        self, journal: Journal, config: SchedulerConfig, seed: int, num_engines: int = 2
    ) -> None:
        self._journal = journal
        self._config = config
        self._random = random.Random(seed)
        self._epoch = 0
        self._now_ns = 0
        self._requests: list[Request] = []
        self._engines = [self._start() for _ in range(num_engines)]

    @property
    def cores(self) -> list[Core]:
        """The cores that live."""
        return [engine.core for engine in self._engines]

    def run(self, num_turns: int, *, to_the_end: bool = True) -> None:
        """In each turn something happens to each engine."""
        for _ in range(num_turns):
            for index, engine in enumerate(self._engines):
                self._tick(engine)
                self._happen(index, engine)
        for engine in self._engines:
            while to_the_end and engine.fill():
                self._tick(engine)
                engine.answer()

    def _start(self) -> RecordedEngine:
        self._epoch += 1
        return RecordedEngine(self._journal, self._config, epoch=self._epoch)

    def _tick(self, engine: RecordedEngine) -> None:
        self._now_ns += STEP_NS
        engine.core.tick(self._now_ns)

    def _happen(self, index: int, engine: RecordedEngine) -> None:
        what = self._random.random()
        if what < 0.25:
            self._arrive(engine)
        elif what < 0.28:
            engine.core.abort(f"r{self._random.randint(1, len(self._requests) + 1)}")
        elif what < 0.29:
            self._engines[index] = self._lose(engine)
        elif what < 0.31:
            self._move(engine)
        elif engine.fill():
            self._answer(engine)

    def _answer(self, engine: RecordedEngine) -> None:
        what = self._random.random()
        if what < 0.03:
            engine.answer(StepFault(error=RuntimeError("a fault that the test asked for")))
        elif what < 0.05:
            engine.skip()
        elif what < 0.06:
            engine.refuse()
        else:
            engine.answer()

    def _move(self, engine: RecordedEngine) -> None:
        """A request goes from `engine` to one that may be another."""
        request = engine.core.withdraw(f"r{self._random.randint(1, len(self._requests) + 1)}")
        if request is not None:
            other = self._random.choice(self._engines)
            self._tick(other)
            other.core.readmit(request)

    def _lose(self, engine: RecordedEngine) -> RecordedEngine:
        requests = engine.core.evacuate()
        successor = self._start()
        self._tick(successor)
        for request in requests:
            if not request.is_finished:
                successor.core.readmit(request)
        return successor

    def _arrive(self, engine: RecordedEngine) -> None:
        number = len(self._requests) + 1
        draw = self._random
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
        self._requests.append(request)
        with suppress(DomainError):
            engine.core.add(request)
        engine.core.take_ended()

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
            deadline_ns=draw.choice([None, None, self._now_ns + 40 * STEP_NS]),
            adapter=draw.choice(["", "", "", "x", "y", "z"]),
            cache_salt=draw.choice(["", "", "salt"]),
            uses_prefix_cache=draw.random() < 0.9,
        )


def write_entries(path: Path, entries: Iterable[journal_pb2.JournalEntry]) -> None:
    """Writes a journal of these entries."""
    file = SegmentFile(path)
    for entry in entries:
        file.write(entry.SerializeToString())
    file.close()
