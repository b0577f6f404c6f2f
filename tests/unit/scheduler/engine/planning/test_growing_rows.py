"""Running requests go on: who gets blocks, who yields, lookahead slots, sequences that join."""

from __future__ import annotations

import pytest

from tests.support.core.driver import CoreDriver, growing_rows
from tests.support.core.in_process import CheckedEngine

# -- blocks ------------------------------------------------------------------------------------


def test_grow_preempts_as_few_as_needed_when_several_could_yield() -> None:
    driver = CoreDriver(num_device_blocks=5, prefix_caching=False)
    requests = [driver.add(4, max_tokens=9) for _ in range(5)]
    driver.step()
    driver.step()
    # Each needs a second block. Two yield to the oldest two, and then the third to nobody.
    assert [request.num_preemptions for request in requests] == [0, 0, 1, 1, 1]
    assert driver.core.num_free_blocks == 1
    assert driver.core.num_running == 2


def test_grow_takes_no_block_while_a_slot_is_free() -> None:
    driver = CoreDriver(num_device_blocks=4, prefix_caching=False)
    requests = [driver.add(5, max_tokens=4) for _ in range(2)]
    driver.run()
    assert [request.num_preemptions for request in requests] == [0, 0]


def test_grow_waits_for_blocks_of_a_step_in_flight() -> None:
    driver = CoreDriver(num_device_blocks=5, prefix_caching=False, sample=lambda: 7)
    first = driver.add(7, max_tokens=8)
    second = driver.add(5, max_tokens=8)
    third = driver.add(1, max_tokens=8)
    driver.step()
    driver.plan()
    driver.core.abort(second.request_id)
    # The first one's next block comes from the aborted one, once the step is answered.
    assert driver.next_rows() == [("r3", 2, 1)]
    driver.answer()
    driver.answer()
    assert ("r1", 8, 1) in driver.next_rows()
    assert (first.num_preemptions, third.num_preemptions) == (0, 0)


def test_nobody_yields_when_moves_of_the_step_hold_blocks() -> None:
    driver = CoreDriver(num_device_blocks=8, prefix_caching=False)
    pair = driver.add(10, n=2)
    driver.add(4)
    driver.step()
    growing = growing_rows(driver)
    growing.join_siblings()
    assert driver.core.placement.blocks.has_pinned
    assert not growing.make_room(driver.core.num_free_blocks + 1, pair)
    assert driver.core.num_preemptions == 0


def test_row_keeps_the_block_of_its_next_token() -> None:
    driver = CoreDriver(sliding_window=4)
    request = driver.add(4)
    driver.step()
    growing = growing_rows(driver)
    growing.grow()
    lacking = driver.core.num_free_blocks + 1
    assert not growing.make_room(lacking, request, is_joining=True)
    assert driver.next_rows() == [("r1", 4, 1)]


# -- lookahead slots ---------------------------------------------------------------------------


@pytest.mark.parametrize(("num_slots", "steps"), [(0, [3, 7]), (2, [2, 5]), (4, [2, 3, 7])])
def test_schedule_extends_tables_earlier_when_lookahead_is_asked_for(
    num_slots: int, steps: list[int]
) -> None:
    driver = CoreDriver(num_lookahead_slots=num_slots)
    driver.add(3)
    writes = [driver.step()[0].table_writes for _ in range(8)]
    assert [step for step, write in enumerate(writes, 1) if write] == steps


def test_lookahead_reserves_nothing_beyond_the_end() -> None:
    driver = CoreDriver(num_lookahead_slots=50)
    driver.add(3, max_tokens=2)
    driver.step()
    driver.plan()
    assert driver.core.num_free_blocks == 64 - 2


def test_lookahead_slots_are_taken_back_when_blocks_run_out() -> None:
    driver = CoreDriver(num_device_blocks=8, num_lookahead_slots=12, prefix_caching=False)
    requests = [driver.add(5, max_tokens=11) for _ in range(2)]
    driver.run()
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert driver.core.num_free_blocks == 8


def test_executor_is_not_told_of_a_block_taken_back_at_once() -> None:
    driver = CoreDriver(num_lookahead_slots=9, prefix_caching=False)
    request = driver.add(3)
    driver.step()
    growing, placement = growing_rows(driver), driver.core.placement
    growing.grow()
    assert growing.make_room(driver.core.num_free_blocks + 1, request)
    writes = placement.rows.take_table_writes([])
    blocks = placement.rows.held_blocks(request.sequence.row_id)
    assert blocks[writes.start_indexes[0] :] == writes.block_ids.tolist()


def test_requests_get_their_tokens_when_reserved_slots_come_and_go() -> None:
    engine = CheckedEngine(num_device_blocks=9, num_lookahead_slots=7, depth=3)
    for start in (1, 20, 40):
        engine.add(list(range(start, start + 6)), max_tokens=18)
    engine.run()


# -- sequences that join -----------------------------------------------------------------------


def test_siblings_join_when_the_first_has_computed_the_prompt() -> None:
    driver = CoreDriver(max_num_batched_tokens=6)
    driver.add(10, n=3)
    assert [driver.next_rows(), driver.next_rows(), driver.next_rows()] == [
        [("r1", 0, 6)],
        [("r1", 6, 4)],
        [("r1", 10, 1), ("r1", 9, 1), ("r1", 9, 1)],
    ]


def test_siblings_share_the_prompt_when_they_join() -> None:
    driver = CoreDriver(prefix_caching=False)
    request = driver.add(10, n=3)
    driver.step()
    plan, _ = driver.step()
    tables = [
        driver.core.placement.rows.block_table(sequence.row_id).tolist()
        for sequence in request.sequences
    ]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    own = [table[2] for table in tables]
    assert len(set(own)) == 3
    assert sorted(plan.moves.copy) == sorted((own[0], block) for block in own[1:])
    assert driver.core.num_free_blocks == 64 - 5


def test_sibling_waits_when_its_source_joins_in_the_same_step() -> None:
    driver = CoreDriver(prefix_caching=False)
    first, second, _ = driver.add(9, n=3, resume=[[20], [30], [40]]).sequences
    driver.step()
    driver.step()
    for sequence in (first, second):
        driver.core.placement.drop(sequence)
    plan, _ = driver.step()
    sources, destinations = zip(*plan.moves.copy, strict=True)
    assert set(sources).isdisjoint(destinations)
    driver.step()
    assert driver.core.num_running == 3


def test_rows_are_kept_for_siblings_when_others_wait() -> None:
    driver = CoreDriver(max_num_seqs=3, max_num_batched_tokens=4)
    driver.add(8, n=3)
    driver.add(1, "next")
    assert [row[0] for row in driver.next_rows()] == ["r1"]
    assert [row[0] for row in driver.next_rows()] == ["r1"]
    assert [row[0] for row in driver.next_rows()] == ["r1"] * 3
