"""A driver with executors in this process, and random events in bursts.

There are no sockets and no threads, and events move the clock. Between two events the loop gets
from none to three turns, so that what was scheduled for the next turn meets what happens in this
one. The same seed is the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scheduler_service.callers import Admission, num_computed_outputs
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.executors import LinkConfig
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values import (
    FinishReason,
    Int32Array,
    PolicyConfig,
    Request,
    SamplingParams,
    SchedulingParams,
    ScoredToken,
    TokenEvent,
    sequence_seed,
)
from scheduler_service.scheduler.values import Sequence as CoreSequence
from scheduler_service.streams import Outbox, client_key
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_contract import DomainError
from tests.support.core.in_process import SCHEDULER_EPOCH
from tests.support.core.machines import CONFIG, VOCAB_SIZE, BurstLink, Machine
from tests.support.fakes.fake_model import expected_tokens


@dataclass(slots=True)
class CountedCharge:
    """Counts how often a request began and what it was charged for. Implements `RequestCost`."""

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
        """Checks that an ended request was charged for at least `num_told` tokens."""
        assert self.num_begun == 1
        (num_outputs,) = self.num_outputs
        assert num_outputs >= num_told


@dataclass(slots=True)
class BurstClient:
    """Sink of one request: its expected and received tokens, by sequence."""

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
        """Returns the sink, which is its own stream."""
        return self

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        """See Stream."""
        self.tokens[0] += token_ids.tolist()

    def flush(self) -> None:
        """See Stream."""

    def repeat_output(self, request: Request) -> None:
        """See Sink."""

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
        """Checks that all received tokens are expected, and complete if the request ended well."""
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


MAX_TURNS = 3000
_QUEUE_POLICIES = ("fcfs", "fcfs", "priority", "fair")
# Whoever waits has soon waited for long.
_EVENT_NS = 4_000_000

Mutation = Callable[[Random, pb.StepResult], None]


class Burst:
    """Run of random events. `mutations`: possible faults of results. `guilty`: see Machine.

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

    def make_cluster(self) -> Driver:
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
        return Driver(
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
        """Submits two requests; the first fills an executor and is aborted before it begins.

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
        """Answers all steps and restores lost executors until all requests have ended."""
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
        """Loses executors whose step was answered under a wrong number, as a step timeout does."""
        for engine in self.cluster.executors:
            link = self.machines[engine.address].link
            is_current = link is self.cluster.membership.sessions[engine.address].link
            if link is not None and is_current and engine.engine.num_in_flight and link.is_silent:
                link.break_off()

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    def _is_known(self, machine: Machine) -> bool:
        return any(engine.address == machine.address for engine in self.cluster.executors)

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
        """Returns the clients whose requests have not ended."""
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
        """Registers an executor again, as it does while it has no stream."""
        await self.join(self._machine())

    # -- what holds ----------------------------------------------------------------------------

    def check(self, *, is_over: bool) -> None:
        """Checks the tokens of all clients, and that no request is at two executors."""
        assert self.errors == [], "in a callback"
        owners: set[str] = set()
        for engine in self.cluster.executors:
            if not engine.takes_requests:
                continue
            held = engine.engine.placement.requests
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
        assert num_errors <= CONFIG.max_num_seqs * self.num_spoiled
