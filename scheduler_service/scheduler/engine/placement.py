"""Placement: where every request of one engine is, and the transitions between these places.

A request runs or is preempted as a whole. Sequences of a running request may still wait to join.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Container, Iterator
from operator import attrgetter

import numpy as np

from scheduler_service.scheduler.engine.adapter_slots import AdapterSlots
from scheduler_service.scheduler.engine.blocks import BlockManager, PrefixHit
from scheduler_service.scheduler.engine.preemption_costs import PreemptionCosts
from scheduler_service.scheduler.engine.row_columns import RowColumns
from scheduler_service.scheduler.engine.step_draft import Departures, StepDraft, TablePart
from scheduler_service.scheduler.engine.suspects import Suspects
from scheduler_service.scheduler.queue import WaitingQueue
from scheduler_service.scheduler.values import (
    FinishReason,
    Int32Array,
    Int64Array,
    KvLost,
    ParamsSets,
    Preempted,
    PreemptionCause,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerConfig,
    Sequence,
    SequenceStatus,
    StartedRequest,
    StepCounters,
    SwappedIn,
)

_rank = attrgetter("rank")
_PREEMPTED = frozenset({RequestStatus.PREEMPTED, RequestStatus.SWAPPED})
_HAS_KV = frozenset({SequenceStatus.RUNNING, SequenceStatus.SWAPPED})


class Placement:
    """Rows, block tables and preempted requests of one engine, and the transitions between them.

    `requests`: all requests that this engine has begun or adopted, by id. `preempted`: requests
    without a row, by rank; their KV is in the host pool, or has to be recomputed. `queue`: the
    waiting queue, which also ranks the requests here. `groups`: running requests that have, or may
    come to have, more than one sequence. `adapters`: number of rows that use each adapter.
    `rows_of_tenants`: row ids of each tenant. `params_sets`: sampling parameters of all requests.

    `may_stop`: [vocab_size] bool, tokens that may end some sequence; other tokens need no second
    look. `last_planned_step_id`, `last_answered_step_id`: the steps between them are in flight.
    `now_ns`: the current time. `ended`, `ended_sequences`: requests, and sequences of requests that
    return several, whose end is still to be reported. `num_sampled`: output tokens of each tenant
    to report to the queue, where it charges for them. `num_queued_tokens`: tokens of preempted
    requests. `tally`: totals so far.
    """

    def __init__(
        self, config: SchedulerConfig, queue: WaitingQueue, costs: PreemptionCosts, last_step: int
    ) -> None:
        max_blocks = config.num_blocks_for(config.max_len + config.num_lookahead_slots) + 1
        self._config = config
        self._costs = costs
        self.rows = RowColumns(config.max_num_seqs, config.max_len, config.block_size, max_blocks)
        self.blocks = BlockManager(config, self.rows)
        self.queue = queue
        self.preempted: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.groups: dict[str, Request] = {}
        # Free rows that requests of `groups` will still need.
        self._num_reserved_rows = 0
        self.adapters = Counter[str]()
        self.adapter_slots = AdapterSlots(config.num_adapter_slots)
        self.rows_of_tenants: dict[str, set[int]] = {}
        self.params_sets = ParamsSets()
        self.may_stop = np.zeros(config.vocab_size, np.bool_)
        self.departures = Departures()
        self.suspects = Suspects()
        self.last_planned_step_id = last_step
        self.last_answered_step_id = last_step
        self.last_answered_at_ns = 0
        self.now_ns = 0
        self.ended: list[Request] = []
        self.ended_sequences: list[Sequence] = []
        self.num_sampled = Counter[str]()
        self.num_queued_tokens = 0
        self.tally = StepCounters()

    # -- state ---------------------------------------------------------------------------------

    @property
    def draft(self) -> StepDraft:
        """Draft of the next step."""
        return self.blocks.draft

    @property
    def swapped(self) -> list[Request]:
        """Preempted requests whose KV is in the host pool, by rank."""
        return [r for r in self.preempted if r.status is RequestStatus.SWAPPED]

    @property
    def num_unreserved_rows(self) -> int:
        """Number of rows that no running request has or will need."""
        return self.rows.num_free - self._num_reserved_rows

    @property
    def is_full_of_suspects(self) -> bool:
        """Whether there are as many suspects as rows; no other request begins then."""
        return len(self.suspects) >= self.rows.max_num_rows

    def is_settled(self, request: Request) -> bool:
        """Returns whether no step in flight concerns the request."""
        return all(s.settles_at_step <= self.last_answered_step_id for s in request.sequences)

    def known_tokens(self, sequence: Sequence) -> Int32Array:
        """Returns all known tokens of a sequence, wherever it is; perhaps as a view."""
        if sequence.status is SequenceStatus.RUNNING:
            return self.rows.known_tokens(sequence.row_id)
        return sequence.token_ids

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Appends a token that no step promised to a sequence, wherever it is."""
        if sequence.status is SequenceStatus.RUNNING:
            self.rows.append_token(sequence.row_id, token_id)
        else:
            sequence.token_ids = np.append(sequence.token_ids, np.int32(token_id))

    def sequence_of(self, row_id: int, stay_id: int) -> Sequence | None:
        """Returns the sequence that owns the results of a row's stay; None after its departure.

        The answer is the same for all steps in flight: a loss ends every stay that it spoils,
        wherever the sequence is.
        """
        if self.rows.stay_ids[row_id] == stay_id:
            return self.rows.sequence(row_id)
        return self.departures.sequences.get(stay_id)

    # -- transitions ---------------------------------------------------------------------------

    def adopt(self, request: Request) -> None:
        """Adds a suspect as a preempted request without a row, to be tried apart from others."""
        self._accept(request)
        self._move(request, RequestStatus.PREEMPTED)

    def start(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Gives a row to the first sequence of a request without rows, behind the end of `hit`.

        The request must have left the waiting queue, or be preempted.
        """
        request = sequence.request
        if request.request_id not in self.requests:
            self._accept(request)
        self._move(request, RequestStatus.RUNNING)
        self._note_start(sequence, hit)
        self._add_row(sequence, hit.num_tokens)
        self.blocks.find_cross(request)
        self.blocks.allocate(sequence, hit)
        self.blocks.allocate_cross(request)

    def _accept(self, request: Request) -> None:
        """Registers a prepared request with this engine."""
        request.params_set = self.params_sets.take(request.params_set)
        if request.stop_token_ids:
            self.may_stop[list(request.stop_token_ids)] = True
        for sequence in request.sequences:
            sequence.chains = {}
        request.rank = self.queue.rank(request)
        request.step_class = self.queue.step_class(request)
        self.requests[request.request_id] = request
        self.suspects.add(request)

    def join(self, sequence: Sequence, source: Sequence, num_shared: int) -> None:
        """Gives a row to a waiting sequence of a running request, sharing KV of `source`."""
        self._add_row(sequence, num_shared)
        self.blocks.fork(source.row_id, sequence, num_shared)

    def join_alone(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Gives a row to a waiting sequence of a running request, without KV of its siblings."""
        self._add_row(sequence, hit.num_tokens)
        self.blocks.allocate(sequence, hit)

    def preempt(self, request: Request, cause: PreemptionCause) -> None:
        """Takes rows and blocks of a running request; results of steps in flight stay valid.

        Swaps the KV out if that is cheaper than a recompute.
        """
        self.draft.yielded_tenants.add(request.scheduling.tenant)
        request.num_preemptions += 1
        status, request_status = SequenceStatus.WAITING, RequestStatus.PREEMPTED
        is_encoded, kind = False, PreemptionMode.RECOMPUTE
        if self._is_to_be_swapped(request):
            status, request_status = SequenceStatus.SWAPPED, RequestStatus.SWAPPED
            is_encoded, kind = request.is_encoded, PreemptionMode.SWAP
            self.blocks.swap_out(request)
            self.draft.has_swapped_out = True
        self.tally.preemptions[kind, cause] += 1
        self.draft.notes.append(Preempted(request, kind, cause))
        for sequence in list(running(request)):
            self._vacate(sequence, awaits_results=True)
            sequence.status = status
        self._move(request, request_status)
        request.is_encoded = is_encoded

    def swap_in(self, request: Request) -> None:
        """Gives rows and blocks to a swapped request, which runs again."""
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.SWAPPED:
                self._add_row(sequence, sequence.num_computed)
        self.blocks.swap_in(request)
        self.draft.has_swapped_in = True
        self.draft.notes.append(SwappedIn(request))
        self._move(request, RequestStatus.RUNNING)

    def drop(self, sequence: Sequence) -> None:
        """Sends a sequence back to wait: forgets its KV and its results of steps in flight."""
        if sequence.status in _HAS_KV:
            self.draft.notes.append(KvLost(sequence.request))
        self._strip(sequence, SequenceStatus.WAITING)
        sequence.num_promised, sequence.candidates = 0, None
        self._update_status(sequence.request)

    def finish_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence and frees all it has; other sequences of its request go on."""
        self._strip(sequence, SequenceStatus.FINISHED)
        self._update_status(sequence.request)

    def finish(
        self, request: Request, reason: FinishReason, error: tuple[str, str] | None = None
    ) -> None:
        """Ends a request in any state, and notes it in `ended`."""
        request.finish_reason, request.error = reason, error
        for sequence in request.unfinished:
            sequence.finish_reason = reason
        self.remove(request)
        self.ended.append(request)

    def remove(self, request: Request) -> None:
        """Frees rows and blocks of a request, in any state, without reporting an end.

        A request that has not begun is removed from the waiting queue.
        """
        self.suspects.acquit(request)
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self._strip(sequence, SequenceStatus.FINISHED)
        self._move(request, RequestStatus.ABSENT)
        if self.requests.pop(request.request_id, None) is not None:
            self.params_sets.give_back(request.params_set)
        elif request in self.queue:
            self.queue.remove(request)

    def step_answered(self, step_id: int) -> None:
        """Frees blocks and departures that waited for a step, whose result was applied."""
        self.last_answered_step_id, self.last_answered_at_ns = step_id, self.now_ns
        self.blocks.step_answered(step_id)
        if self.departures:
            self.departures.step_answered(step_id)

    # -- blocks of steps in flight ---------------------------------------------------------------

    def table_part(self, row_id: int) -> TablePart:
        """Returns the blocks that a row has now."""
        rows, request = self.rows, self.rows.sequence(row_id).request
        return TablePart(
            request.request_id,
            int(rows.stay_ids[row_id]),
            int(rows.num_released[row_id]),
            rows.held_blocks(row_id),
            tuple(request.cross_blocks),
            int(rows.last_step_id[row_id]),
            request.encoded_in_step > self.last_answered_step_id,
        )

    def release_behind_windows(self, row_ids: Int64Array, ends: Int32Array) -> None:
        """Takes back blocks before table index `ends`: no token still to be computed reads them."""
        rows = self.rows
        starts, steps = rows.num_released[row_ids], rows.last_step_id[row_ids]
        blocks = self.blocks.release_behind_windows(row_ids, ends, self.last_answered_step_id)
        if not (steps > self.last_answered_step_id).any():
            return
        stay_ids, counts = rows.stay_ids[row_ids].tolist(), (ends - starts).tolist()
        each = zip(row_ids.tolist(), stay_ids, starts.tolist(), counts, steps.tolist(), strict=True)
        end, answered = 0, self.last_answered_step_id
        for row_id, stay_id, start, count, step_id in each:
            first, end = end, end + count
            if step_id > answered:
                request, freed = rows.sequence(row_id).request, blocks[first:end]
                cross = tuple(request.cross_blocks), step_id, request.encoded_in_step > answered
                part = TablePart(request.request_id, stay_id, start, freed, *cross)
                self.departures.table_parts.append(part)

    # -- pending blocks ------------------------------------------------------------------------

    def publish_chunk(self, row_id: int, start: int, num_new_tokens: int) -> None:
        """Publishes the blocks that known tokens of a row fill from position `start` on.

        A request that finds them may run in the same step: in every layer all writes precede reads.
        """
        if not self._config.prefix_caching:
            return
        rows, block_size = self.rows, self._config.block_size
        first, end = start // block_size, (start + num_new_tokens) // block_size
        if first == end:
            return
        found = self.blocks.prefixes.publish(
            rows.sequence(row_id),
            rows.known_tokens(row_id),
            rows.block_tables[row_id, first:end].tolist(),
            first,
        )
        if found:
            # Blocks of the encoder's input may be there already.
            self.draft.published.setdefault(int(rows.stay_ids[row_id]), []).extend(found)

    # -- helpers -------------------------------------------------------------------------------

    @property
    def kept_adapters(self) -> Container[str]:
        """Adapters of rows, and of waiting requests that this step found to lack something else."""
        wanted = self.draft.wanted_adapters
        return self.adapters.keys() | wanted if wanted else self.adapters

    def load_adapter(self, adapter: str) -> None:
        """Has the executor load an adapter, for which there is a slot."""
        self.adapter_slots.load(
            adapter, self.kept_adapters, self.last_answered_step_id, self.now_ns
        )

    def _note_start(self, sequence: Sequence, hit: PrefixHit) -> None:
        num_on_host = min(len(hit.host_blocks) * self._config.block_size, hit.num_tokens)
        num_tokens = len(sequence.token_ids)
        self.draft.notes.append(
            StartedRequest(sequence.request, num_tokens, hit.num_tokens, num_on_host)
        )

    def _add_row(self, sequence: Sequence, num_computed: int) -> None:
        request = sequence.request
        if num_computed < len(sequence.token_ids):
            # The sequence recomputes its tokens; new candidates then come with its last token.
            sequence.candidates = None
        self.rows.add(sequence, request.rank, num_computed, request.step_class)
        self.adapters[request.scheduling.adapter] += 1
        self.rows_of_tenants.setdefault(request.scheduling.tenant, set()).add(sequence.row_id)
        self._num_reserved_rows -= request.request_id in self.groups
        self.draft.add_row(sequence)

    def _vacate(self, sequence: Sequence, *, awaits_results: bool) -> None:
        row_id, scheduling = sequence.row_id, sequence.request.scheduling
        part = self.table_part(row_id)
        if part.last_step_id > self.last_answered_step_id:
            self.departures.table_parts.append(part)
            if awaits_results:
                self.departures.expect_results(sequence, part)
        self.blocks.release(row_id, self.last_answered_step_id)
        self.draft.remove_row(row_id)
        self.rows.remove(sequence)
        self.adapters[scheduling.adapter] -= 1
        if self.adapters[scheduling.adapter] == 0:
            del self.adapters[scheduling.adapter]
            self.adapter_slots.used(scheduling.adapter, self.last_planned_step_id)
        self.rows_of_tenants[scheduling.tenant].remove(row_id)
        if not self.rows_of_tenants[scheduling.tenant]:
            del self.rows_of_tenants[scheduling.tenant]
        self._num_reserved_rows += sequence.request.request_id in self.groups

    def _strip(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Takes all KV of a sequence, and drops its results of steps in flight."""
        if sequence.status is SequenceStatus.RUNNING:
            self._vacate(sequence, awaits_results=False)
        elif sequence.status is SequenceStatus.SWAPPED:
            self.blocks.drop_host_table(sequence)
        self.departures.ignore_results(sequence)
        is_ending = status is SequenceStatus.FINISHED and sequence.status is not status
        if is_ending and sequence.request.params.beam is None:
            # A beam search replaces an ended beam by another.
            self._num_reserved_rows -= sequence.request.request_id in self.groups
        sequence.status = status

    def _is_to_be_swapped(self, request: Request) -> bool:
        rows = [sequence.row_id for sequence in running(request)]
        if any(row_id in self.draft.new_rows for row_id in rows):
            return False  # the blocks of new rows are only filled or moved by this very step
        num_computed = int(self.rows.num_computed[rows].sum())
        num_blocks = len(self.blocks.blocks_of(request))
        return self._costs.prefers_swap(
            num_blocks=num_blocks, num_tokens=num_computed, num_sequences=len(rows)
        ) and self.blocks.can_swap_out(request)

    def _update_status(self, request: Request) -> None:
        """Sets the status of a request of this engine to match its sequences."""
        if request.request_id not in self.requests:
            return  # it has not begun
        statuses = {sequence.status for sequence in request.sequences}
        if SequenceStatus.RUNNING in statuses:
            self._move(request, RequestStatus.RUNNING)
        elif SequenceStatus.SWAPPED in statuses:
            self._move(request, RequestStatus.SWAPPED)
        elif SequenceStatus.WAITING in statuses:
            self._move(request, RequestStatus.PREEMPTED)
        else:
            self._move(request, RequestStatus.ABSENT)

    def _move(self, request: Request, status: RequestStatus) -> None:
        if request.status is status:
            return
        self._leave(request)
        request.status = status
        if status in _PREEMPTED:
            request.num_queued_tokens = sum(len(s.token_ids) for s in request.unfinished)
            self.num_queued_tokens += request.num_queued_tokens
            request.queued_at_ns = self.now_ns
            insort(self.preempted, request, key=_rank)
        if status is RequestStatus.PREEMPTED:
            request.is_encoded = False
        elif status is RequestStatus.RUNNING:
            self.params_sets.start(request.params_set)
            if request.params.num_sequences > 1:
                self.groups[request.request_id] = request
                self._num_reserved_rows += _num_rows_lacking(request)

    def _leave(self, request: Request) -> None:
        if request.status in _PREEMPTED:
            self.num_queued_tokens -= request.num_queued_tokens
            self.preempted.remove(request)
        if request.status is RequestStatus.SWAPPED:
            self.blocks.drop_swapped(request)
        elif request.status is RequestStatus.RUNNING:
            if self.groups.pop(request.request_id, None) is not None:
                self._num_reserved_rows -= _num_rows_lacking(request)
            self.params_sets.stop(request.params_set)
            self.blocks.release_cross(
                request, self.last_planned_step_id, self.last_answered_step_id
            )


def running(request: Request) -> Iterator[Sequence]:
    """Returns the sequences of a request that have a row."""
    return (s for s in request.sequences if s.status is SequenceStatus.RUNNING)


def _num_rows_lacking(request: Request) -> int:
    """Returns the rows that a running request will need besides those it has."""
    return request.num_rows_wanted - sum(1 for _ in running(request))
