"""What must hold of a scheduler core at any time, computed anew from what it holds."""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler_service.scheduler.engine import Engine, Placement
from scheduler_service.scheduler.engine.blocks import BlockPool
from scheduler_service.scheduler.values import (
    ID_BYTES,
    NO_ROW,
    Request,
    RequestStatus,
    SchedulerConfig,
    Sequence,
    SequenceStatus,
    StepPlan,
)
from scheduler_service.step_codec import encode_params
from tests.support.fakes.fake_runner import FakeRunner

_STATUS_OF_REQUEST = {
    SequenceStatus.RUNNING: RequestStatus.RUNNING,
    SequenceStatus.SWAPPED: RequestStatus.SWAPPED,
    SequenceStatus.WAITING: RequestStatus.PREEMPTED,
}


def check_core(scheduler: Engine) -> None:
    """Blocks, rows, requests and sequences agree with each other."""
    placement = scheduler.placement
    check_blocks(placement)
    check_requests(placement)
    check_rows(placement)
    if scheduler.num_in_flight == 0:
        assert not placement.rows.num_unsure[placement.rows.order].any()
        assert placement.blocks.num_deferred == 0
        assert not placement.departures


# -- blocks ----------------------------------------------------------------------------------------


def check_blocks(placement: Placement) -> None:
    """Every block is free or referenced, as often as something names it."""
    blocks = placement.blocks
    device = Counter(blocks.draft.pinned_device_blocks)
    host = Counter(blocks.draft.pinned_host_blocks)
    for row_id in placement.rows.order.tolist():
        device.update(placement.rows.held_blocks(row_id))
    for request in placement.requests.values():
        device.update(request.cross_blocks)
        host.update(request.host_cross_blocks)
        for sequence in request.sequences:
            host.update(block for block in sequence.host_table if block >= 0)
    for _, deferred in blocks.deferred:
        device.update(deferred)
    _check_pool(blocks.device, device)
    _check_pool(blocks.host, host)


def _check_pool(pool: BlockPool, held: Counter[int]) -> None:
    all_blocks = range(pool.num_blocks)
    assert [pool.reference_count(block) for block in all_blocks] == [held[b] for b in all_blocks]
    free = pool.free_blocks
    assert sorted(free) == [block for block in all_blocks if not held[block]]
    assert pool.num_free == len(free)
    hashes = {block: name for block in all_blocks if (name := pool.hash_of(block)) is not None}
    assert all(pool.find(name) == block for block, name in hashes.items())
    assert len(hashes) == pool.num_published
    assert [block in hashes for block in free] == sorted(block in hashes for block in free)


def check_emptied(placement: Placement) -> None:
    """Checks, without requests, that each pool gives every block once and then publishes none.

    Takes all blocks: the placement is of no use afterwards.
    """
    blocks = placement.blocks
    taken = blocks.device.allocate(blocks.device.num_free)
    assert sorted(taken) == list(range(blocks.device.num_blocks))
    # Those that were evicted live on in the host pool.
    blocks.take_draft()
    taken = blocks.host.allocate(blocks.host.num_free)
    assert sorted(taken) == list(range(blocks.host.num_blocks))
    assert blocks.device.num_published == blocks.host.num_published == 0


def check_published(
    placement: Placement,
    in_flight: list[StepPlan],
    contents: dict[bytes, tuple[int, ...]],
    runner: FakeRunner,
) -> None:
    """Checks the contents of all published blocks that no step in flight fills.

    `contents`: chains by hash.
    """
    pending = {block for plan in in_flight for found in plan.published.values() for block in found}
    blocks = placement.blocks
    moves = [*(plan.moves for plan in in_flight), blocks.draft.moves]
    pending_host = {block for each in moves for _, block in each.swap_out}
    for pool, stored, unwritten in (
        (blocks.device, runner.device_chains, pending),
        (blocks.host, runner.host_chains, pending_host),
    ):
        found = {block: h for h in contents if (block := pool.find(h)) is not None}
        assert len(found) == pool.num_published, "a hash of nothing, or two of one block"
        for block, block_hash in found.items():
            if block not in unwritten:
                # The last block of an encoder's input may have free slots.
                content = contents[block_hash]
                assert tuple(stored[block].tolist())[: len(content)] == content


# -- requests --------------------------------------------------------------------------------------


def check_requests(placement: Placement) -> None:
    """Every unfinished request is in the one place that its sequences say."""
    requests = placement.requests.values()
    assert not _at(placement, RequestStatus.WAITING)
    for request in placement.queue:
        assert request.status is RequestStatus.WAITING
        assert request.request_id not in placement.requests
        assert all(sequence.row_id == NO_ROW for sequence in request.sequences)
        assert request.is_finished is False
    preempted = _at(placement, RequestStatus.PREEMPTED) | _at(placement, RequestStatus.SWAPPED)
    assert set(placement.preempted) == preempted
    assert len(placement.preempted) == len(preempted)
    assert placement.preempted == sorted(placement.preempted, key=lambda request: request.rank)
    running = _at(placement, RequestStatus.RUNNING)
    check_params_sets(placement, running)
    rows_in_use = placement.rows.order.tolist()
    groups = {r for r in _at(placement, RequestStatus.RUNNING) if r.params.num_sequences > 1}
    assert set(placement.groups.values()) == groups
    num_wanted = sum(request.num_rows_wanted for request in groups)
    num_of_others = sum(placement.rows.sequence(i).request not in groups for i in rows_in_use)
    num_unreserved = placement.rows.max_num_rows - num_wanted - num_of_others
    assert placement.num_unreserved_rows == num_unreserved
    for request in requests:
        assert not request.is_finished
        _check_sequences(request)
    num_queued_tokens = sum(request.num_queued_tokens for request in placement.preempted)
    assert placement.num_queued_tokens == num_queued_tokens


def check_params_sets(placement: Placement, running: set[Request]) -> None:
    """Checks that equal parameters share one set, whose bytes count once while requests run."""
    requests = list(placement.requests.values())
    sets = {request.params_set for request in requests}
    told = {(_told(request), request.params_set) for request in requests}
    assert len(told) == len(sets) == len({encoded for encoded, _ in told})
    told_now = {_told(request): request for request in running}
    num_bytes = sum(map(_num_bytes, told_now.values()))
    assert placement.params_sets.num_running_bytes == num_bytes
    for each in sets:
        assert each.num_requests == sum(request.params_set is each for request in requests)
        assert each.num_running == sum(request.params_set is each for request in running)


def _told(request: Request) -> bytes:
    return encode_params(request.row_params, request.params_set.stop_token_ids)


def _num_bytes(request: Request) -> int:
    return request.row_params.num_bytes + ID_BYTES * len(request.params_set.stop_token_ids)


def _at(placement: Placement, place: RequestStatus) -> set[Request]:
    return {request for request in placement.requests.values() if request.status is place}


def _check_sequences(request: Request) -> None:
    statuses = {sequence.status for sequence in request.unfinished}
    assert not statuses >= {SequenceStatus.RUNNING, SequenceStatus.SWAPPED}
    first = next(status for status in _STATUS_OF_REQUEST if status in statuses)
    assert request.status is _STATUS_OF_REQUEST[first]
    has_encoder = request.encoder_token_ids is not None
    assert bool(request.cross_blocks) == (has_encoder and request.status is RequestStatus.RUNNING)
    assert bool(request.host_cross_blocks) == (
        has_encoder and request.status is RequestStatus.SWAPPED
    )
    for sequence in request.sequences:
        status = sequence.status
        assert (sequence.row_id != NO_ROW) == (status is SequenceStatus.RUNNING)
        assert bool(sequence.host_table) == (status is SequenceStatus.SWAPPED)
        assert (sequence.finish_reason is not None) == (status is SequenceStatus.FINISHED)


# -- rows ------------------------------------------------------------------------------------------


def check_rows(placement: Placement) -> None:
    """Columns are in order, and rows belong to whom they say."""
    rows = placement.rows
    order: list[int] = rows.order.tolist()
    assert len(set(order)) == len(order) == rows.max_num_rows - rows.num_free
    ranks = [(*rows.sequence(row).request.rank, rows.sequence(row).index) for row in order]
    assert ranks == sorted(ranks)
    running = {s for r in placement.requests.values() for s in r.sequences if s.row_id != NO_ROW}
    assert {rows.sequence(row_id) for row_id in order} == running
    adapters = Counter(rows.sequence(row).request.scheduling.adapter for row in order)
    assert placement.adapters == adapters
    ids = np.array(order, np.int64)
    assert (rows.num_computed[ids] <= rows.num_tokens[ids]).all()
    assert (rows.num_computed[ids] <= rows.num_slots[ids]).all()
    assert (rows.num_known[ids] <= rows.num_tokens[ids]).all()
    assert (rows.num_tokens[ids] <= rows.stop_len[ids]).all()
    num_sure = rows.num_computed[ids] - rows.num_unsure[ids]
    assert (rows.num_released[ids] * rows.block_size <= num_sure).all()
    assert (rows.num_unsure[ids] >= 0).all()
    assert (rows.num_known[ids] <= rows.num_tokens[ids] - rows.num_unsure[ids]).all()
    assert len(set(rows.stay_ids[ids].tolist()) - {0}) == len(order)
    assert rows.num_without_promise == np.count_nonzero(rows.promises[ids] == 0)
    for row_id in order:
        params = rows.sequence(row_id).request.params
        may_repeat = bool(rows.may_repeat[row_id])
        assert not may_repeat or params.grammar is not None
        assert bool(rows.promises[row_id]) == (params.beam is None and not may_repeat)
        assert rows.sequence(row_id).row_id == row_id
        assert min(rows.held_blocks(row_id), default=0) >= 0
        if rows.sequence(row_id).candidates is not None:
            assert rows.num_computed[row_id] == rows.num_tokens[row_id], "of an earlier token"


# -- plans -----------------------------------------------------------------------------------------


def check_plan(
    plan: StepPlan, swapped_before: set[Request], scheduler: Engine, config: SchedulerConfig
) -> None:
    """A step keeps to its limits; `swapped_before`: who was swapped before it was planned."""
    placement = scheduler.placement
    assert plan.num_tokens <= config.max_num_batched_tokens
    assert len(plan.work.row_ids) <= config.max_num_seqs
    assert len(plan.work.row_ids) or plan.moves
    sequences = [placement.rows.sequence(row_id) for row_id in plan.work.row_ids.tolist()]
    adapters = {sequence.request.scheduling.adapter for sequence in sequences}
    assert len(adapters - {""}) <= config.max_adapters
    swapped = set(placement.swapped)
    came_back = {r for r in swapped_before - swapped if r.status is RequestStatus.RUNNING}
    assert not came_back or not swapped - swapped_before, "swapped in while swapping out"


# -- charges ---------------------------------------------------------------------------------------


def lengths_of(scheduler: Engine) -> dict[Sequence, int]:
    """Known tokens of all sequences."""
    placement = scheduler.placement
    return {
        sequence: len(placement.known_tokens(sequence))
        for request in (*placement.requests.values(), *placement.queue)
        for sequence in request.sequences
    }


def check_charges(
    scheduler: Engine, lengths: dict[Sequence, int], num_sampled: Counter[str]
) -> None:
    """Checks that each tenant is charged for the tokens its sequences got since `lengths_of`.

    A beam search is charged for the tokens of all beams, of which it does not keep all.
    """
    if not scheduler.placement.queue.charges_outputs:
        assert not num_sampled
        return
    known_tokens, num_gained = scheduler.placement.known_tokens, Counter[str]()
    searching = set[str]()
    for sequence, length in lengths.items():
        tenant = sequence.request.scheduling.tenant
        if sequence.request.params.beam is not None:
            searching.add(tenant)
        else:
            num_gained[tenant] += len(known_tokens(sequence)) - length
    assert num_sampled >= num_gained
    for tenant in num_sampled.keys() - searching:
        assert num_sampled[tenant] == num_gained[tenant]
