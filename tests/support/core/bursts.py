"""A cluster with executors in this process, and bursts of what can happen to it, drawn at random.

The event loop runs nothing but what is drawn: no sockets, no threads, and a clock that events move.
Between two events it gets from none to three turns, so that what was scheduled for the next turn
meets what happens in this one. The same seed is the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from executor_service.service.decode_batch import decode_batch
from executor_service.service.encode_answer import encode_answer, encode_info
from executor_service.steps.step import StepInput
from executor_service.steps.step_executor import StepExecutor
from scheduler_service.callers.admission import Admission
from scheduler_service.callers.quotas import num_computed_outputs
from scheduler_service.cluster import Cluster
from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import PolicyConfig
from scheduler_service.core.plan import TokenEvent
from scheduler_service.core.request import (
    FinishReason,
    Int32Array,
    Request,
    SchedulingParams,
    ScoredToken,
    sequence_seed,
)
from scheduler_service.core.request import Sequence as CoreSequence
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.executors.executor_link import ExecutorLost, LinkConfig
from scheduler_service.request_names import RequestName
from scheduler_service.step_codec import EncodedBatch
from scheduler_service.streams.outbox import Outbox
from scheduler_service.streams.sinks import client_key
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_rpc.domain_error import DomainError
from tests.support.core.driver import make_config
from tests.support.core.in_process import executor_info
from tests.support.fakes.fake_chain import expected_tokens
from tests.support.fakes.fake_runner import FakeRunner, StepFault

VOCAB_SIZE = 97
SCHEDULER_EPOCH = 7
MAX_TURNS = 3000
_QUEUE_POLICIES = ("fcfs", "fcfs", "priority", "fair")
# Whoever waits has soon waited for long.
_EVENT_NS = 4_000_000
_CONFIG = make_config(
    vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(), max_num_seqs=4, num_device_blocks=24
)

Mutation = Callable[[Random, pb.StepResult], None]


class Machine:
    """An executor at an address, life after life. `link`: the scheduler's latest way to it."""

    def __init__(self, address: str, guilty: int | None = None) -> None:
        """`guilty`: steps with a request whose number is a multiple of it fail."""
        self.address = address
        self._guilty = guilty
        self.epoch = 0
        self.link: BurstLink | None = None
        # Whether a scheduler sent it away, as it remembers; whether it is about to end.
        self.says_drained = False
        self.says_draining = False
        # The step that it has measured.
        self.trial_step: pb.TrialStep | None = None
        self.restart()

    def restart(self) -> None:
        """A new life with empty pools."""
        self.epoch += 1
        self.runner = FakeRunner(
            block_size=_CONFIG.block_size,
            num_device_blocks=_CONFIG.num_device_blocks,
            vocab_size=VOCAB_SIZE,
            fault=self._fault,
        )
        self.executor = StepExecutor(executor_info(_CONFIG, self.epoch), self.runner)

    def _fault(self, step: StepInput) -> StepFault:
        seeds = step.seeds.tolist()
        if self._guilty is not None and any(seed % self._guilty == 0 for seed in seeds):
            return StepFault(error=RuntimeError("a request that nobody survives"))
        return StepFault()

    @property
    def info(self) -> pb.ExecutorInfo:
        """What it says of itself."""
        info = encode_info(executor_info(_CONFIG, self.epoch))
        info.address, info.model.digest = self.address, "d" * 64
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
        answer = self._machine.executor.execute(
            decode_batch(pb.ScheduleBatch.FromString(batch.data))
        )
        self.held.append(encode_answer(answer))

    def release(self, change: Callable[[pb.StepResult], None] | None = None) -> None:
        """The oldest result comes in."""
        if self.held:
            result = self.held.pop(0)
            if change is not None:
                change(result)
            self._arrived.put_nowait(result)

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


@dataclass(slots=True)
class CountedCharge:
    """What a request costs; how often it began, and how it ended. Implements `Charge`."""

    num_begun: int = 0
    num_outputs: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """See Charge."""
        self.num_begun += 1

    def end(self, request: Request) -> None:
        """See Charge."""
        assert self.num_begun == 1
        self.num_outputs.append(num_computed_outputs(request))

    def check(self, num_told: int) -> None:
        """It is over, and the client was told `num_told` tokens: these at least were charged."""
        assert self.num_begun == 1
        (num_outputs,) = self.num_outputs
        assert num_outputs >= num_told


@dataclass(slots=True)
class BurstClient:
    """The sink of one request: what it is to get, by sequence, and what it got."""

    expected: list[list[int]]
    tokens: list[list[int]]
    outbox: Outbox
    number: int = 0
    finished: Request | None = None
    num_endings: int = 0
    prompt_scores: list[int] = field(default_factory=list)
    charge: CountedCharge = field(default_factory=CountedCharge)
    is_gone: bool = False

    @property
    def stream(self) -> BurstClient:
        """Itself."""
        return self

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        """See Stream."""
        self.tokens[0] += token_ids.tolist()

    def flush(self) -> None:
        """See Stream."""

    def token(self, event: TokenEvent) -> None:
        """See Sink."""
        self.tokens[event.sequence.index].append(event.token_id)

    def prompt_logprobs(self, scored: list[ScoredToken]) -> None:
        """See Sink."""
        self.prompt_scores += [score.position for score in scored]

    def finish_sequence(self, sequence: CoreSequence) -> None:
        """See Sink."""

    def finish(self, request: Request) -> None:
        """See Sink."""
        self.finished = request
        self.num_endings += 1

    def check(self, *, is_over: bool) -> None:
        """What it got is true, and all there is if it ended well."""
        assert self.num_endings <= 1
        if is_over:
            self.charge.check(sum(map(len, self.tokens)))
        reason = self.finished.finish_reason if self.finished is not None else None
        is_complete = is_over and reason not in (None, FinishReason.ERROR, FinishReason.ABORTED)
        for index, tokens in enumerate(self.tokens):
            expected = self.expected[index]
            assert tokens == expected[: len(tokens)]
            if is_complete:
                assert tokens == expected


class Burst:
    """One run. `mutations`: how results may be spoiled. `guilty`: see Machine.

    `has_faults`: executors are lost and replaced, too. That begins everything anew, and hides
    whoever was forgotten.
    """

    def __init__(
        self,
        seed: int,
        mutations: Sequence[Mutation] = (),
        *,
        guilty: int | None = None,
        has_faults: bool = True,
    ) -> None:
        self.random = Random(seed)
        self.guilty = guilty
        names = ("executor:0", "executor:1") if has_faults else ("executor:0",)
        self.machines = {address: Machine(address, guilty) for address in names}
        self.clients: dict[str, BurstClient] = {}
        self.num_spoiled = 0
        self.errors: list[str] = []
        self._mutations = mutations
        self._has_faults = has_faults
        self._now_ns = 0
        self.cluster = self.make_cluster()

    def make_cluster(self) -> Cluster:
        """A cluster whose links lead to the machines."""
        depth = self.random.randint(1, 3)
        config = ClusterConfig(
            max_num_seqs=4,
            # So few that a prompt alone leaves nothing to others, or so many that it never does.
            max_num_batched_tokens=self.random.choice([4, 2048]),
            pipeline_depth=depth,
            max_num_waiting=100,
            # So many are lost here that it would be somebody's fault.
            max_executor_losses=1000,
            policies=PolicyConfig(queue_policy=self.random.choice(_QUEUE_POLICIES)),
        )
        return Cluster(
            config, SCHEDULER_EPOCH, lambda: None, now_ns=lambda: self._now_ns, connect=self.connect
        )

    def connect(self, info: pb.ExecutorInfo, _config: LinkConfig) -> BurstLink:
        """A link to the machine at the address of `info`."""
        return BurstLink(self.machines[info.address], info)

    async def join(self, machine: Machine) -> None:
        """The machine registers."""
        await self.cluster.join(machine.info)

    # -- what happens --------------------------------------------------------------------------

    async def run(self, num_events: int = 60) -> None:
        """Draws what happens, lets everything end well, and checks what clients got."""
        asyncio.get_running_loop().set_exception_handler(self._note_error)
        for machine in self.machines.values():
            await self.join(machine)
        await self._turns(3)
        events = [self._arrive, self._arrive, self._leave, self._answer, self._answer]
        events += [self._answer, self._repeat]
        if self._has_faults:
            events += [self._spoil, self._replace, self._lose]
        for _ in range(num_events):
            self._now_ns += _EVENT_NS
            await self.random.choice(events)()
            await self._turns(self.random.choice([0, 0, 1, 2, 3]))
            self.check(is_over=False)
        await self._end()
        self.check(is_over=True)
        await self.cluster.drain(0)

    async def run_with_one_that_leaves_at_once(self) -> None:
        """Two come at one moment, of whom the first fills an executor, and is gone before it began.

        Nothing else ever happens.
        """
        for machine in self.machines.values():
            await self.join(machine)
        await self._turns(3)
        await self._arrive()
        await self._arrive()
        self.cluster.abort(RequestName(next(iter(self.clients))))
        await self._end()
        self.check(is_over=True)
        await self.cluster.drain(0)

    def _note_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(str(context.get("exception") or context["message"]))

    async def _end(self) -> None:
        """Everybody answers, whoever is away comes back, until nobody is left."""
        for _ in range(MAX_TURNS):
            if not self.cluster.num_unfinished:
                return
            for machine in self.machines.values():
                if not self._is_known(machine):
                    await self.join(machine)
                if machine.link is not None:
                    machine.link.release()
            await self._turns(2)
            self._lose_silent()
        hanging = list(self._unfinished())
        raise AssertionError(f"requests hang: {hanging}")

    def _lose_silent(self) -> None:
        """What a step timeout does: a step was answered under a number that was answered before."""
        for engine in self.cluster.engines:
            link = self.machines[engine.link.info.address].link
            if link is engine.link and engine.scheduler.num_in_flight and link.is_silent:
                link.break_off()

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    def _is_known(self, machine: Machine) -> bool:
        return any(engine.link.info.address == machine.address for engine in self.cluster.engines)

    def _machine(self) -> Machine:
        return self.random.choice(list(self.machines.values()))

    async def _arrive(self) -> None:
        number = len(self.clients) + 1
        params = SamplingParams(
            max_tokens=self.random.randint(1, 8),
            num_logprobs=self.random.choice([None, None, 1]),
            num_prompt_logprobs=self.random.choice([None, None, 0]),
            n=1 if self.guilty else self.random.choice([1, 1, 1, 2]),
        )
        prompt = [number % VOCAB_SIZE, *range(self.random.randint(1, 9))]
        expected = [
            expected_tokens(prompt, params.max_tokens or 0, sequence_seed(number, i), VOCAB_SIZE)
            for i in range(params.n)
        ]
        delivery = self.cluster.delivery
        client = BurstClient(expected, [[] for _ in range(params.n)], delivery.new_outbox())
        arrival = self.cluster.next_arrival()
        request = Request.create(
            f"r{number}",
            prompt,
            params,
            arrival=arrival,
            seed=number,
            scheduling=SchedulingParams(priority=self.random.choice([0, 0, 1, -1])),
        )
        delivery.open_stream(client)
        request.client_key = client_key(client.number, 0)
        self.clients[request.request_id] = client
        name = RequestName(request.request_id)
        self.cluster.submit(request, client, Admission(name, client.charge))

    async def _leave(self) -> None:
        unfinished = self._unfinished()
        if not unfinished or self.random.random() < 0.5:
            return
        name = self.random.choice(list(unfinished))
        if self.random.random() < 0.7:
            self.cluster.abort(RequestName(name))
        else:
            unfinished[name].is_gone = True
            self.cluster.fail_stream(unfinished[name], DomainError("STREAM_NOT_READ", "gone"))

    def _unfinished(self) -> dict[str, BurstClient]:
        """Those that wait for their end."""
        return {
            name: client
            for name, client in self.clients.items()
            if client.finished is None and not client.is_gone
        }

    async def _answer(self) -> None:
        link = self._machine().link
        if link is not None:
            link.release()

    async def _spoil(self) -> None:
        """A result comes that is not as it must be."""
        link = self._machine().link
        if link is None or not link.held or not self._mutations:
            return
        mutation = self.random.choice(self._mutations)
        self.num_spoiled += 1
        link.release(lambda result: mutation(self.random, result))

    async def _replace(self) -> None:
        """The executor restarts and registers, before anybody has noticed that it was gone."""
        machine = self._machine()
        machine.restart()
        await self.join(machine)

    async def _lose(self) -> None:
        machine = self._machine()
        if machine.link is not None:
            machine.link.break_off()

    async def _repeat(self) -> None:
        """It registers again, as it does while it has no stream."""
        await self.join(self._machine())

    # -- what holds ----------------------------------------------------------------------------

    def check(self, *, is_over: bool) -> None:
        """Everybody got what is true; no core has what is not its own."""
        assert self.errors == [], "in a callback"
        owners: set[str] = set()
        for engine in self.cluster.engines:
            if not engine.takes_requests:
                continue
            held = engine.scheduler.placement.requests
            assert owners.isdisjoint(held)
            owners |= held.keys()
        num_errors = 0
        for number, client in enumerate(self.clients.values(), 1):
            client.check(is_over=is_over)
            if client.finished is None or client.finished.error is None:
                continue
            reason, _ = client.finished.error
            if self.guilty and number % self.guilty == 0:
                assert reason == "EXECUTOR_LOST_REPEATEDLY"
                continue
            num_errors += 1
            assert reason in ("ROW_FAILED", "INVALID_LOGITS")
        # A spoiled column concerns all rows of its step that asked for it.
        assert num_errors <= _CONFIG.max_num_seqs * self.num_spoiled
