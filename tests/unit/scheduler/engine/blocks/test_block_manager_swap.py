"""The block manager: swap out and in, the encoder's blocks, and the host pool as a cache."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.row_columns import NO_STAY, RELEASED
from scheduler_service.scheduler.values.request import Request, SequenceStatus
from tests.support.core.parts import Tables


def make_pair(tables: Tables) -> Request:
    """A request of two running sequences that share two full blocks of three."""
    request = tables.request([1] * 10, n=2)
    first, second = request.sequences
    tables.place(first)
    tables.fork(first, second, 9)
    tables.blocks.take_draft()
    return request


def swap_out(tables: Tables, request: Request) -> list[tuple[int, int]]:
    """As a preemption does it; returns the moves."""
    tables.blocks.swap_out(request)
    for sequence in request.sequences:
        tables.leave(sequence)
        sequence.status = SequenceStatus.SWAPPED
    cross, request.cross_blocks = request.cross_blocks, []
    tables.blocks.device.free(cross)
    return tables.blocks.take_draft().moves.swap_out


def swap_in(tables: Tables, request: Request) -> list[tuple[int, int]]:
    for sequence in request.sequences:
        tables.rows.add(sequence, (request.arrival,), sequence.num_computed)
    tables.blocks.swap_in(request)
    return tables.blocks.take_draft().moves.swap_in


def test_blocks_of_counts_a_block_once_when_sequences_share_it() -> None:
    tables = Tables()
    assert len(tables.blocks.blocks_of(make_pair(tables))) == 4


@pytest.mark.parametrize(("num_host_blocks", "fits"), [(4, True), (3, False)])
def test_can_swap_out_says_whether_all_blocks_fit_when_some_are_shared(
    num_host_blocks: int, fits: bool
) -> None:
    tables = Tables(num_host_blocks=num_host_blocks)
    assert tables.blocks.can_swap_out(make_pair(tables)) is fits


def test_swap_out_moves_a_block_once_when_sequences_share_it() -> None:
    tables = Tables(num_host_blocks=8)
    request = make_pair(tables)
    moves = swap_out(tables, request)
    assert len({source for source, _ in moves}) == len(moves) == 4
    assert tables.blocks.host.num_free == 4
    assert tables.blocks.device.num_free == tables.config.num_device_blocks


def test_swap_in_restores_what_is_shared_when_a_pair_comes_back() -> None:
    tables = Tables(num_host_blocks=8)
    request = make_pair(tables)
    first, second = request.sequences
    to_host = dict(swap_out(tables, request))
    tables.blocks.device.allocate(5)  # So that it comes back elsewhere.
    to_device = dict(swap_in(tables, request))
    assert sorted(to_device) == sorted(to_host.values())
    shared = tables.table(first)[:2]
    assert tables.table(second)[:2] == shared
    assert tables.table(first)[2] != tables.table(second)[2]
    assert [tables.blocks.device.reference_count(block) for block in shared] == [2, 2]
    assert tables.blocks.host.num_free == 8


def test_swap_in_restores_every_block_in_its_place_when_the_order_differs() -> None:
    tables = Tables(num_host_blocks=8)
    sequence = tables.sequence([1] * 12)
    before = tables.place(sequence)
    to_host = dict(swap_out(tables, sequence.request))
    to_device = dict(swap_in(tables, sequence.request))
    assert tables.table(sequence) == [to_device[to_host[block]] for block in before]


def test_swap_keeps_how_much_is_computed_when_a_sequence_goes_out_and_in() -> None:
    tables = Tables(num_host_blocks=8)
    sequence = tables.sequence([1] * 12)
    tables.place(sequence)
    tables.rows.num_computed[sequence.row_id] = 7
    swap_out(tables, sequence.request)
    swap_in(tables, sequence.request)
    assert tables.rows.num_computed[sequence.row_id] == 7


def test_swap_leaves_out_what_is_behind_the_window_when_the_model_slides() -> None:
    tables = Tables(num_host_blocks=8, sliding_window=4)
    sequence = tables.sequence([1] * 8)
    tables.place(sequence)
    tables.rows.num_computed[sequence.row_id] = 8
    tables.slide(sequence)
    assert len(swap_out(tables, sequence.request)) == 1
    assert tables.blocks.num_swap_in_blocks(sequence.request) == 1
    swap_in(tables, sequence.request)
    assert tables.table(sequence)[0] == RELEASED
    tables.leave(sequence)
    assert tables.blocks.device.num_free == tables.config.num_device_blocks


def test_swap_in_keeps_host_blocks_when_the_step_is_not_yet_planned() -> None:
    tables = Tables(num_host_blocks=2)
    sequence = tables.sequence([1] * 8)
    tables.place(sequence)
    swap_out(tables, sequence.request)
    tables.rows.add(sequence, (1,), sequence.num_computed)
    tables.blocks.swap_in(sequence.request)
    assert tables.blocks.host.num_free == 0
    tables.blocks.take_draft()
    assert tables.blocks.host.num_free == 2


def test_swap_in_keeps_device_blocks_when_the_request_leaves_before_the_step() -> None:
    tables = Tables(num_device_blocks=2, num_host_blocks=2)
    sequence = tables.sequence([1] * 8)
    tables.place(sequence)
    swap_out(tables, sequence.request)
    tables.rows.add(sequence, (1,), sequence.num_computed)
    tables.blocks.swap_in(sequence.request)
    tables.leave(sequence)
    assert tables.blocks.has_pinned
    assert tables.blocks.device.num_free == 0
    tables.blocks.take_draft()
    assert tables.blocks.device.num_free == 2


def test_drop_swapped_frees_host_blocks_once_when_sequences_share_them() -> None:
    tables = Tables(num_host_blocks=8)
    request = make_pair(tables)
    swap_out(tables, request)
    tables.blocks.drop_host_table(request.sequences[0])
    assert tables.blocks.host.num_free == 5
    tables.blocks.drop_swapped(request)
    assert tables.blocks.host.num_free == 8


# -- the encoder's blocks ----------------------------------------------------------------------


def test_allocate_cross_gives_blocks_once_when_asked_again() -> None:
    tables = Tables()
    request = tables.request([1], encoder=[5] * 9)
    assert tables.blocks.num_cross_blocks(request) == 3
    for _ in range(2):
        tables.blocks.allocate_cross(request)
    assert len(request.cross_blocks) == 3
    assert tables.blocks.num_cross_blocks(request) == 0
    assert tables.blocks.device.num_free == tables.config.num_device_blocks - 3


def test_num_cross_blocks_is_none_when_there_is_no_encoder() -> None:
    tables = Tables()
    assert tables.blocks.num_cross_blocks(tables.request([1])) == 0


def test_release_cross_forgets_what_was_encoded_when_blocks_go() -> None:
    tables = Tables()
    request = tables.request([1], encoder=[5] * 9)
    tables.blocks.allocate_cross(request)
    request.is_encoded = True
    tables.blocks.release_cross(request, last_step_id=0, last_answered=0)
    assert (request.cross_blocks, request.is_encoded) == ([], False)
    assert tables.blocks.device.num_free == tables.config.num_device_blocks


def test_swap_takes_the_blocks_of_the_encoder_along_when_there_is_one() -> None:
    tables = Tables(num_host_blocks=8)
    request = tables.request([1] * 4, encoder=[5] * 8)
    tables.place(request.sequence)
    tables.blocks.allocate_cross(request)
    cross = list(request.cross_blocks)
    to_host = dict(swap_out(tables, request))
    to_device = dict(swap_in(tables, request))
    assert request.cross_blocks == [to_device[to_host[block]] for block in cross]
    assert request.host_cross_blocks == []
    assert tables.blocks.host.num_free == 8


# -- the host pool as a cache ------------------------------------------------------------------


def test_allocate_copies_what_it_evicts_to_the_host_when_there_is_room() -> None:
    tables = Tables(num_device_blocks=2, num_host_blocks=2)
    sequence, table = tables.place_published([1] * 8)
    tables.leave(sequence)
    tables.blocks.device.allocate(1)
    ((source, destination),) = tables.blocks.take_draft().moves.swap_out
    assert source == table[1]
    assert tables.blocks.host.find(sequence.block_hashes[2]) == destination


def test_allocate_copies_nothing_when_the_host_pool_is_full() -> None:
    tables = Tables(num_device_blocks=2, num_host_blocks=1)
    sequence, _ = tables.place_published([1] * 8)
    tables.leave(sequence)
    tables.blocks.host.allocate(1)
    tables.blocks.device.allocate(2)
    assert not tables.blocks.draft.moves


def make_demoted() -> Tables:
    """Only the host pool has the blocks of the tokens [1] * 8."""
    tables = Tables(num_device_blocks=4, num_host_blocks=4)
    sequence, _ = tables.place_published([1] * 8)
    tables.leave(sequence)
    tables.blocks.device.free(tables.blocks.device.allocate(4))
    tables.blocks.take_draft()
    return tables


def test_allocate_brings_a_block_back_when_only_the_host_has_it() -> None:
    tables = make_demoted()
    follower = tables.sequence([1] * 9)
    hit = tables.blocks.prefixes.find(follower)
    table = tables.place(follower, hit)
    draft = tables.blocks.take_draft()
    assert draft.moves.swap_in == list(zip(hit.host_blocks, table[:2], strict=True))
    assert sorted(draft.published[NO_STAY]) == sorted(table[:2])
    assert tables.blocks.device.find(follower.block_hashes[1]) == table[0]


def test_allocate_keeps_what_it_brings_back_when_the_sequence_leaves_before_the_step() -> None:
    tables = make_demoted()
    follower = tables.sequence([1] * 9)
    tables.place(follower, tables.blocks.prefixes.find(follower))
    tables.leave(follower)
    assert tables.blocks.has_pinned
    assert (tables.blocks.device.num_free, tables.blocks.host.num_free) == (2, 2)
    tables.blocks.take_draft()
    assert (tables.blocks.device.num_free, tables.blocks.host.num_free) == (4, 4)


def test_allocate_copies_nothing_when_the_host_has_what_it_evicts() -> None:
    tables = make_demoted()
    follower = tables.sequence([1] * 9)
    tables.place(follower, tables.blocks.prefixes.find(follower))
    tables.blocks.take_draft()
    tables.leave(follower)
    tables.blocks.device.allocate(4)
    assert not tables.blocks.draft.moves
