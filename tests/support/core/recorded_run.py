"""A recorded scheduler at work: random requests, failures and losses, all drawn from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from scheduler_service.journal import FileJournal, Journal, SegmentFile
from scheduler_service.scheduler import LossCause, Scheduler, events
from scheduler_service.scheduler.values import (
    BeamParams,
    Feature,
    FleetConfig,
    Grammar,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
)
from splitserve.scheduler.v1 import journal_pb2
from splitserve_contract import DomainError
from tests.support.core.driver import make_config
from tests.support.core.machines import Machine
from tests.support.core.pure_fleet import PureFleet
from tests.support.fakes.fake_runner import SlowCompiler, StepFault

VOCAB_SIZE = 97
STEP_NS = 1_000_000
_ADAPTERS = ("x@1", "y@1", "z@1")
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
        "max_run_ahead": 4,
        "max_run_ahead_ms": 1000,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset({96}),
        "features": frozenset(Feature),
        "max_adapters": 2,
        "num_adapter_slots": 2,
    }
    return make_config(**(values | options))


def open_file(path: Path, max_bytes: int = 2**26) -> FileJournal:
    """A journal of a scheduler."""
    return FileJournal(path, max_bytes)


def run_machine(
    config: SchedulerConfig | None = None, address: str = "executor:1", epoch: int = 1
) -> Machine:
    """Executor of a recorded run, which compiles grammars slowly."""
    machine = Machine(address, config=config or run_config(), epoch=epoch)
    machine.other_fault = SlowCompiler(num_asks=8)
    machine.runner.us_per_block = 3
    if machine.config.speculates:
        # There is something to guess, and a pass takes the same for more tokens.
        machine.runner.num_words = 2
    else:
        machine.runner.us_per_token = 5
    return machine


class RandomRun:
    """Random events of a scheduler with executors of one `config`.

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
        self._fleet = PureFleet(fleet, journal)
        self._config = config
        self._random = random.Random(seed)
        self._disturbed_ratio = disturbed_ratio
        self._is_watched = is_watched
        self._epoch = 0
        self._num_requests = 0
        self._addresses = [f"executor:{number}" for number in range(num_executors)]
        # Executors that were given up, which may come back.
        self._given_up: dict[str, Machine] = {}
        for address in self._addresses:
            self._start(address)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler itself."""
        return self._fleet.scheduler

    @property
    def now_ns(self) -> int:
        """The time of the latest event."""
        return self._fleet.now_ns

    def run(self, num_turns: int, *, to_the_end: bool = True) -> None:
        """Draws one event per executor and turn. `to_the_end`: then ends all requests."""
        for turn in range(num_turns):
            if self._is_watched and turn % 3:
                _look_at(self.scheduler)
            for address in self._addresses:
                self._fleet.now_ns += STEP_NS
                self._fleet.settle()
                if address in self._fleet.held:
                    self._happen(self._fleet.machines[address])
                else:
                    self._come_back(address)
        if to_the_end:
            self._heal()
            self._fleet.run()

    def _start(self, address: str) -> None:
        self._epoch += 1
        self._join(run_machine(self._config, address, self._epoch))

    def _join(self, executor: Machine) -> None:
        last_step_id = self._fleet.last_step_ids.get((executor.address, executor.epoch), 0)
        self._fleet.join(executor, last_step_id=last_step_id)

    def _come_back(self, address: str) -> None:
        """Lets the lost executor return, or a new one join, or neither."""
        what = self._random.random()
        if what < 0.3 and address in self._given_up:
            self._join(self._given_up.pop(address))
        elif what < 0.6:
            self._start(address)

    def _heal(self) -> None:
        for address in self._addresses:
            if address not in self._fleet.held:
                self._start(address)
                continue
            self._fleet.machines[address].fails = False
            self._fleet.handle(events.ExecutorUndrained(address))
            self._fleet.handle(events.ExecutorDoubted(address, is_doubtful=False))

    def _happen(self, executor: Machine) -> None:
        what = self._random.random()
        if what < 0.25:
            self._arrive()
        elif what < 0.28:
            number = self._random.randint(1, self._num_requests + 1)
            self._fleet.handle(events.RequestAborted(f"r{number}"))
        elif what < 0.28 + self._disturbed_ratio:
            self._disturb(executor)
        elif self._fleet.loads[executor.address] and self._random.random() < 0.5:
            why_not = "the test asked for it" if self._random.random() < 0.1 else ""
            self._fleet.end_load(executor.address, why_not)
        elif self._fleet.held[executor.address]:
            self._answer(executor)

    def _disturb(self, executor: Machine) -> None:
        draw, fleet, address = self._random, self._fleet, executor.address
        match draw.randint(0, 10):
            case 0 | 1:
                self._given_up[address] = executor
                cause = draw.choice([LossCause.DIED, LossCause.SILENT])
                fleet.handle(events.ExecutorLost(address, cause, "the test asked for it"))
            case 2:
                self._start(address)
            case 3:
                fleet.handle(events.ExecutorDraining(address))
            case 4:
                fleet.handle(events.ExecutorDrainExpired(address))
            case 5:
                fleet.handle(events.ExecutorUndrained(address))
            case 6:
                is_doubtful = draw.random() < 0.5
                fleet.handle(events.ExecutorDoubted(address, is_doubtful=is_doubtful))
            case 7:
                executor.fails = not executor.fails
            case 8:
                weights = draw.choice([{}, {"a": 2.0}, {"a": 0.5, "b": 3.0}])
                fleet.handle(events.TenantsWeighed(weights))
            case 9:
                fleet.handle(events.AdapterRegistered(draw.choice(_ADAPTERS)))
            case _:
                fleet.now_ns = max(fleet.now_ns, fleet.wakes_at_ns or 0)
                fleet.settle()
                fleet.handle(events.Tick(looks_everywhere=True))

    def _answer(self, executor: Machine) -> None:
        what = 1.0 if executor.fails else self._random.random()
        plan, _ = self._fleet.held[executor.address][0]
        if what > 0.5 and plan.work.reports_parts and not executor.fails:
            self._fleet.report(executor)
            if not self._fleet.held.get(executor.address):
                return
        if what < 0.03:
            fault = StepFault(error=RuntimeError("a fault that the test asked for"))
            self._fleet.answer(executor, fault=fault)
        elif what < 0.05:
            self._fleet.skip(executor)
        elif what < 0.06:
            self._fleet.refuse(executor)
        else:
            self._fleet.answer(executor)

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
            self._fleet.submit(request)

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
            adapter=draw.choice(["", "", "", *_ADAPTERS]),
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
