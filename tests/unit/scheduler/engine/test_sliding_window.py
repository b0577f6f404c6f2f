"""Sliding windows through the core: memory is bounded, and nothing within a window is missing."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values.config import BatchPolicyName, PreemptionMode
from scheduler_service.scheduler.values.request import sequence_seed
from tests.support.core.checked_engine import VOCAB_SIZE, CheckedEngine
from tests.support.core.driver import CoreDriver
from tests.support.fakes.fake_chain import expected_tokens


def most_blocks_in_use(engine: CheckedEngine) -> int:
    """Runs to the end; returns the most blocks that were in use after a step was planned."""
    most = 0
    while True:
        engine.engine.fill()
        most = max(most, engine.config.num_device_blocks - engine.core.num_free_blocks)
        if not engine.engine.in_flight:
            engine.check()
            return most
        engine.answer()


def test_blocks_behind_the_window_are_freed_when_a_sequence_grows() -> None:
    driver = CoreDriver(sliding_window=6)
    driver.add(1, max_tokens=100)
    in_use = []
    for _ in range(60):
        driver.step()
        in_use.append(64 - driver.core.num_free_blocks)
    # Six tokens lie in three blocks at most.
    assert max(in_use) == 3
    assert in_use[-1] <= 3


def test_sequence_outgrows_the_pool_when_its_window_fits() -> None:
    engine = CheckedEngine(num_device_blocks=4, sliding_window=6, max_model_len=150)
    request = engine.add([1, 2, 3], max_tokens=140)
    engine.run()
    assert len(request.sequence.token_ids) == 143


def test_prompt_is_served_when_it_is_longer_than_the_pool() -> None:
    engine = CheckedEngine(num_device_blocks=4, sliding_window=6)
    engine.add(list(range(90)), max_tokens=5)
    engine.run()


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("prompt_len", [3, 40])
def test_memory_is_bounded_when_sequences_are_long(prompt_len: int, num_sequences: int) -> None:
    engine = CheckedEngine(
        num_device_blocks=64, sliding_window=6, max_num_batched_tokens=8, prefix_caching=False
    )
    engine.add(list(range(prompt_len)), max_tokens=60, n=num_sequences)
    # A window of two blocks and a half, and what a step writes beyond it.
    assert most_blocks_in_use(engine) <= num_sequences * (3 + 2)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_requests_get_their_tokens_when_the_model_slides(window: int, depth: int) -> None:
    engine = CheckedEngine(num_device_blocks=14, sliding_window=window, depth=depth)
    for start in (0, 0, 20):
        engine.add(list(range(start, start + 21)), max_tokens=25)
    engine.run()


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_requests_get_their_tokens_when_windows_are_preempted(mode: PreemptionMode) -> None:
    engine = CheckedEngine(
        num_device_blocks=8, num_host_blocks=8, sliding_window=7, depth=2, preemption_mode=mode
    )
    for start in (0, 20, 40):
        engine.add(list(range(start, start + 13)), max_tokens=25)
    engine.step(6)
    for request in engine.requests[:2]:
        if request.status.value == "running":
            engine.preempt(request)
    engine.run()


def test_window_is_found_when_what_is_behind_it_was_reused() -> None:
    driver = CoreDriver(sliding_window=4, num_device_blocks=16)
    driver.add(33, "first", max_tokens=1)
    driver.run()
    driver.add(33, "second", max_tokens=1)
    assert driver.next_rows() == [("second", 32, 1)]


def test_siblings_share_their_window_when_they_join() -> None:
    engine = CheckedEngine(sliding_window=6, prefix_caching=False)
    engine.add(list(range(30)), n=3, max_tokens=20)
    while engine.core.num_running < 3:
        engine.step()
    rows = engine.core.placement.rows
    tables = [set(rows.held_blocks(sequence.row_id)) for sequence in rows.running]
    assert tables[0] & tables[1] & tables[2]
    engine.run()


@pytest.mark.parametrize("lengths", [(1, 30), (30, 1), (25, 26)])
def test_siblings_go_on_alone_when_what_they_shared_is_behind_the_window(
    lengths: tuple[int, int],
) -> None:
    engine = CheckedEngine(sliding_window=6, depth=2)
    prompt, seed = list(range(20)), 1
    resume = [
        expected_tokens(prompt, length, sequence_seed(seed, index), VOCAB_SIZE, window=6)
        for index, length in enumerate(lengths)
    ]
    request = engine.add(prompt, n=2, max_tokens=40, resume=resume)
    engine.run()
    assert [sequence.num_output_tokens for sequence in request.sequences] == [40, 40]


@pytest.mark.parametrize("window", [3, 6])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_siblings_run_to_their_end_when_the_pool_just_holds_their_windows(
    block_size: int, window: int
) -> None:
    num_blocks = 2 * (-(-window // block_size) + 2)
    for length in range(1, 30, 7):
        driver = CoreDriver(
            block_size=block_size, num_device_blocks=num_blocks, sliding_window=window
        )
        resume = [[10] * length, [20] * (30 - length)]
        request = driver.add(8, n=2, max_tokens=50, resume=resume)
        driver.run(max_steps=500)
        assert request.error is None


@pytest.mark.parametrize("num_slots", [0, 3, 9])
def test_siblings_run_to_their_end_when_lookahead_takes_what_is_free(num_slots: int) -> None:
    driver = CoreDriver(
        block_size=1,
        num_device_blocks=8,
        sliding_window=2,
        num_lookahead_slots=num_slots,
        max_num_batched_tokens=9,
    )
    request = driver.add(3, n=2, max_tokens=20)
    driver.run(max_steps=500)
    assert request.error is None


@pytest.mark.parametrize("batch_policy", BatchPolicyName)
def test_pairs_come_to_their_end_when_the_pool_holds_the_windows_of_one(
    batch_policy: BatchPolicyName,
) -> None:
    driver = CoreDriver(
        block_size=1,
        num_device_blocks=30,
        sliding_window=8,
        max_num_batched_tokens=4,
        max_num_seqs=4,
        prefix_caching=False,
        batch_policy=batch_policy,
        preemption_mode=PreemptionMode.RECOMPUTE,
    )
    requests = [driver.add(10 + i, n=2, max_tokens=14) for i in range(3)]
    driver.run(max_steps=2000)
    assert [request.error for request in requests] == [None] * 3


def test_older_request_keeps_its_blocks_when_a_younger_one_has_a_long_prompt() -> None:
    driver = CoreDriver(num_device_blocks=8, sliding_window=4, prefix_caching=False)
    old = driver.add(3, max_tokens=60)
    driver.step()
    young = driver.add(70, max_tokens=1)
    driver.run()
    assert (old.num_preemptions, young.num_preemptions) == (0, 0)
