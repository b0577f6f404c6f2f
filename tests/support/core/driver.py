"""A scheduler core or a part of it, driven by hand: the test makes up the outcome of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from scheduler_service.journal import dump_state, load_state
from scheduler_service.scheduler.engine import Engine, RowColumns, Siblings
from scheduler_service.scheduler.engine.blocks import NO_HIT, BlockManager, PrefixHit
from scheduler_service.scheduler.engine.outcomes import detach
from scheduler_service.scheduler.engine.planning import GrowingRows, check_request
from scheduler_service.scheduler.queue import WaitingQueue, make_queue_policy
from scheduler_service.scheduler.values import (
    DEFAULT_SCHEDULING,
    FinishReason,
    PreemptionCause,
    Request,
    RequestStatus,
    RowStatus,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    Sequence,
    StepEvents,
    StepOutcome,
    StepPart,
    StepPlan,
    StepStatus,
)
from splitserve_contract import DomainError


class EngineWithQueue(Engine):
    """Waiting, running and preempted requests of one executor; does what a scheduler does."""

    def __init__(self, config: SchedulerConfig, last_step_id: int = 0) -> None:
        policy = make_queue_policy(config.queue_policy, config.tenant_weights)
        self.queue = WaitingQueue(policy)
        super().__init__(config, self.queue, last_step_id)

    def restored(self) -> EngineWithQueue:
        """Returns a copy of the engine, restored from a checkpoint."""
        copy: Any = object.__new__(EngineWithQueue)
        vars(copy).update(load_state(dump_state(vars(self)), dict))
        assert copy.queue is copy.placement.queue
        return copy  # type: ignore[no-any-return]

    # -- state -------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row and have no KV."""
        return len(self.queue) + super().num_waiting

    @property
    def num_unfinished(self) -> int:
        """Number of running, preempted and waiting requests."""
        return len(self.queue) + super().num_unfinished

    @property
    def unfinished_request_ids(self) -> list[str]:
        """Requests that began, then those that wait."""
        return [*super().unfinished_request_ids, *(request.request_id for request in self.queue)]

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens of all unfinished sequences."""
        waiting = (s for request in self.queue for s in request.unfinished)
        return super().num_unfinished_tokens + sum(len(s.token_ids) for s in waiting)

    @property
    def is_queue_full(self) -> bool:
        """Whether `add` refuses any request."""
        return len(self.queue) >= self._config.max_num_waiting

    def find(self, request_id: str) -> Request | None:
        """Returns the unfinished request with this id, if it is here."""
        return self.queue.get(request_id) or self.placement.requests.get(request_id)

    def has_place(self, request: Request) -> bool:
        """Returns whether the queue takes a new request."""
        return self.queue.has_place(request.scheduling.tenant, self._config.max_num_waiting)

    # -- events in ---------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Sets the time; deadlines and waiting times are measured by it."""
        super().tick(now_ns)
        self.queue.tick(now_ns)

    def check(self, request: Request) -> None:
        """Raises DomainError if `request` can never run here."""
        check_request(request, self._config)

    def add(self, request: Request) -> None:
        """Takes a new request. Raises DomainError if it can never run, or if the queue is full.

        A request that has all its tokens already (by resuming) is finished at once.
        """
        self.check(request)
        if not self.has_place(request):
            raise DomainError("QUEUE_FULL", f"{len(self.queue)} requests wait")
        self.readmit(request)

    def readmit(self, request: Request) -> None:
        """Takes a request that was accepted before, however long the queue is."""
        self._check_open()
        assert self.find(request.request_id) is None, "request id in use"
        if request.trial_size:
            self.adopt(request)
        else:
            request.status = RequestStatus.WAITING
            self.queue.push(request)
            self.prepare(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in any state and returns it; None for an unknown id."""
        self._check_open()
        request = self.find(request_id)
        if request is not None:
            self.placement.finish(request, FinishReason.ABORTED)
            self.queue.ended(request.request_id)
        return request

    def withdraw(self, request_id: str) -> Request | None:
        """Removes a request in any state and returns it; None for an unknown id."""
        self._check_open()
        request = self.find(request_id)
        if request is None:
            return None
        moved = detach(request, self.placement)
        self.placement.remove(request)
        self.queue.ended(request.request_id)
        return moved

    def evacuate(self) -> list[Request]:
        """Returns all requests, ready for `readmit` elsewhere; see `Engine.evacuate`."""
        begun = super().evacuate()
        waiting = [detach(request, self.placement) for request in self.queue]
        for request in waiting:
            request.was_in_flight = False
        return [*begun, *waiting]

    # -- steps -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plans the next step; returns None without work."""
        plan = self.plan_step(self.queue)
        self.queue.take_begun()
        return plan

    def apply(self, outcome: StepOutcome) -> StepEvents:
        """Learns from a result; see `Engine.apply`."""
        events = super().apply(outcome)
        self.queue.charge(events.num_sampled)
        return events

    def _add_ended(self, events: StepEvents) -> StepEvents:
        events = super()._add_ended(events)
        for request in events.finished:
            self.queue.ended(request.request_id)
        return events


VOCAB_SIZE = 100
EOS = 99


def make_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "block_size": 4,
        "num_device_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
        "max_num_waiting": 16,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset({EOS}),
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def names(rows: list[tuple[str, int, int]]) -> list[str]:
    """The requests of rows as `CoreDriver` tells of them."""
    return [name for name, _, _ in rows]


class CoreDriver:
    """A scheduler core whose steps are answered with tokens from `sample`."""

    def __init__(self, sample: Callable[[], int] = lambda: 7, **config: object) -> None:
        self.config = make_config(**config)
        self.core = EngineWithQueue(self.config)
        self.sample = sample
        self.in_flight: list[StepPlan] = []
        self.num_requests = 0

    def add(self, prompt: int | list[int], request_id: str = "", **options: Any) -> Request:  # noqa: ANN401
        """Adds a request; see `make_request`."""
        request = self.make_request(prompt, request_id, **options)
        self.core.add(request)
        return request

    def make_request(
        self,
        prompt: int | list[int],
        request_id: str = "",
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        encoder: list[int] | None = None,
        resume: Items[Items[int]] = (),
        **params: object,
    ) -> Request:
        """Returns a request of `prompt`, which is that many tokens, the same for all, or these."""
        self.num_requests += 1
        tokens = [1 + p % 90 for p in range(prompt)] if isinstance(prompt, int) else prompt
        request = Request.create(
            request_id or f"r{self.num_requests}",
            tokens,
            SamplingParams(**params),  # type: ignore[arg-type]
            arrival=self.num_requests,
            seed=0,
            scheduling=scheduling,
            encoder_token_ids=encoder,
            resume_token_ids=resume,
        )
        request.client_key = self.num_requests
        return request

    def preempt(self, request: Request) -> None:
        """Preempts a running request."""
        self.core.placement.preempt(request, PreemptionCause.BLOCKS)

    def plan(self) -> StepPlan | None:
        """Plans the next step; advances the time if only rows without tokens are left."""
        plan = self.core.schedule()
        if self.core.ask_again_at_ns is not None and not self.in_flight:
            self.core.tick(self.core.ask_again_at_ns)
            plan = self.core.schedule()
        if plan is not None:
            self.in_flight.append(plan)
        return plan

    def report(self, *runs: list[int]) -> StepEvents:
        """Reports a part of the oldest step in flight: `runs` are further tokens of each row."""
        counts = np.array([len(run) for run in runs], np.int32)
        token_ids = np.array([token_id for run in runs for token_id in run], np.int32)
        return self.core.take_part(StepPart(self.in_flight[0].step_id, counts, token_ids))

    def answer(
        self,
        status: StepStatus = StepStatus.OK,
        row_statuses: list[RowStatus] | None = None,
        token_ids: list[int] | None = None,
        compute_us: int = 0,
        move_us: int = 0,
        runs: list[list[int]] | None = None,
    ) -> StepEvents:
        """Answers the oldest step in flight. `runs`: the tokens of each row, one or several."""
        plan = self.in_flight.pop(0)
        if runs is not None:
            token_ids = [token_id for run in runs for token_id in run]
        if token_ids is None:
            samples = plan.work.samples
            sampled = [True] * len(plan.work.row_ids) if samples is None else samples
            token_ids = [self.sample() if is_sampled else -1 for is_sampled in sampled]
        columns = np.array(token_ids, np.int32)
        outcome = StepOutcome(
            plan.step_id,
            status,
            columns,
            row_statuses,
            move_us=move_us,
            compute_us=compute_us,
            token_counts=None if runs is None else np.array(list(map(len, runs)), np.int32),
        )
        return self.core.apply(outcome)

    def step(self) -> tuple[StepPlan, StepEvents]:
        plan = self.plan()
        assert plan is not None
        return plan, self.answer()

    def next_rows(self) -> list[tuple[str, int, int]]:
        """Plans a step; see `rows_of`."""
        plan = self.plan()
        assert plan is not None
        return self.rows_of(plan)

    def run(self, depth: int = 1, max_steps: int = 10_000) -> int:
        """Runs until nothing is left; returns the number of steps."""
        for num_steps in range(max_steps):
            while len(self.in_flight) < depth and self.plan():
                pass
            if not self.in_flight:
                return num_steps
            self.answer()
        raise AssertionError(f"still running after {max_steps} steps")

    def rows_of(self, plan: StepPlan) -> list[tuple[str, int, int]]:
        """(request id, first position, number of tokens) of each row, if it is still there."""
        work, placement = plan.work, self.core.placement
        each = zip(
            work.row_ids.tolist(),
            work.stay_ids.tolist(),
            work.num_computed_tokens.tolist(),
            work.num_new_tokens.tolist(),
            strict=True,
        )
        rows = []
        for row_id, stay_id, start, count in each:
            sequence = placement.sequence_of(row_id, stay_id)
            if sequence is not None:
                rows.append((sequence.request.request_id, start, count))
        return rows


def growing_rows(driver: CoreDriver) -> GrowingRows:
    """Returns the part of a core that supplies rows before each step."""
    placement = driver.core.placement
    return GrowingRows(driver.config, placement, Siblings(placement))


class Tables:
    """A block manager and the rows whose tables it fills."""

    def __init__(self, **options: object) -> None:
        self.config = make_config(**options)
        max_blocks = self.config.num_blocks_for(self.config.max_len) + 1
        self.rows = RowColumns(
            self.config.max_num_seqs, self.config.max_len, self.config.block_size, max_blocks
        )
        self.blocks = BlockManager(self.config, self.rows)
        self._num_requests = 0

    def request(
        self,
        prompt: Items[int],
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        encoder: Items[int] | None = None,
        **params: object,
    ) -> Request:
        """A request that is nowhere yet."""
        self._num_requests += 1
        return Request.create(
            f"r{self._num_requests}",
            prompt,
            SamplingParams(**params),  # type: ignore[arg-type]
            arrival=self._num_requests,
            seed=0,
            scheduling=scheduling,
            encoder_token_ids=encoder,
        )

    def sequence(self, prompt: Items[int]) -> Sequence:
        """The sequence of a new request."""
        return self.request(prompt).sequence

    def place(self, sequence: Sequence, hit: PrefixHit = NO_HIT) -> list[int]:
        """Gives a sequence a row and its blocks; returns them."""
        self.rows.add(sequence, (sequence.request.arrival,), hit.num_tokens)
        self.blocks.allocate(sequence, hit)
        return self.table(sequence)

    def place_published(self, prompt: Items[int]) -> tuple[Sequence, list[int]]:
        """A running sequence whose full blocks can be found."""
        sequence = self.sequence(prompt)
        table = self.place(sequence)
        num_full = len(prompt) // self.config.block_size
        self.blocks.prefixes.publish(sequence, sequence.token_ids, table[:num_full], 0)
        return sequence, table

    def fork(self, source: Sequence, sequence: Sequence, num_shared: int) -> list[int]:
        """Gives `sequence` a row that shares what `source` has; returns its blocks."""
        self.rows.add(sequence, (sequence.request.arrival,), num_shared)
        self.blocks.fork(source.row_id, sequence, num_shared)
        return self.table(sequence)

    def slide(self, sequence: Sequence) -> None:
        """Takes back what lies behind the window of a sequence."""
        row_ids = np.array([sequence.row_id], np.int64)
        end = self.blocks.prefixes.first_block_needed(int(self.rows.num_computed[row_ids[0]]))
        self.blocks.release_behind_windows(row_ids, np.array([end], np.int32), 0)

    def leave(self, sequence: Sequence) -> None:
        """Takes row and blocks back; no step is in flight."""
        self.blocks.release(sequence.row_id, last_answered_step_id=0)
        self.rows.remove(sequence)

    def table(self, sequence: Sequence) -> list[int]:
        """The block table of a running sequence."""
        blocks: list[int] = self.rows.block_table(sequence.row_id).tolist()
        return blocks


def make_request(
    arrival: int,
    priority: int = 0,
    tenant: str = "",
    deadline_ns: int | None = None,
    adapter: str = "",
) -> Request:
    """Returns a request without tokens, which policies do not look at."""
    return Request(
        f"r{arrival}",
        SamplingParams(),
        arrival,
        SchedulingParams(
            priority=priority, tenant=tenant, deadline_ns=deadline_ns, adapter=adapter
        ),
    )


def make_queue(
    name: str, waiting: Iterable[Request] = (), weights: Mapping[str, float] | None = None
) -> WaitingQueue:
    """A queue with the policy of this name and these requests."""
    queue = WaitingQueue(make_queue_policy(name, weights or {}))
    for request in waiting:
        queue.push(request)
    return queue


def order(queue: WaitingQueue) -> list[int]:
    """The arrivals of all candidates, if none of them can run."""
    return [request.arrival for request in queue.candidates()]


def admit_next(queue: WaitingQueue, num_uncached_tokens: int = 1) -> Request:
    """Lets the first candidate run; returns it."""
    request = next(queue.candidates())
    queue.begun(request, num_uncached_tokens)
    assert queue.take_begun()[-1] is request
    return request


def end(queue: WaitingQueue, request: Request) -> None:
    """Ends a request."""
    request.finish_reason = FinishReason.STOP
    queue.ended(request.request_id)
