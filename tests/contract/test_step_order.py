"""The phases of a step, and that KV really moves."""

from __future__ import annotations

import pytest

from tests.contract.served import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, PROMPT, Served
from tests.support.steps.batches import NewRow, WorkRow, i32

OTHER = [80, 3, 3, 51, 29, 77, 14]
LONG = [(7 * i + 3) % 150 for i in range(3 * BLOCK_SIZE)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6])
async def test_step_samples_same_token_when_prompt_comes_in_chunks(
    served: Served, chunk: int
) -> None:
    session = served.open()
    new = [NewRow(3, (9, 4), num_prompt=len(PROMPT))]
    for step_id, start in enumerate(range(0, len(PROMPT), chunk), 1):
        part = PROMPT[start : start + chunk]
        is_last = start + chunk >= len(PROMPT)
        base = None if step_id == 1 else step_id - 1
        work = [WorkRow(3, start, part, samples=is_last)]
        batch = served.sender.batch(step_id, base=base, new=new if base is None else (), work=work)
        tokens = await session.tokens(batch)
    assert tokens == served.truth(PROMPT)


async def test_step_samples_nothing_when_row_does_not_sample(served: Served) -> None:
    batch = served.sender.batch(
        1, new=[NewRow(0, (0, 1))], work=[WorkRow(0, 0, PROMPT, samples=False)]
    )
    assert await served.open().tokens(batch) == [-1]


async def test_copy_moves_kv_when_table_is_switched_to_copies(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch(blocks=(0, 1)))
    batch = served.sender.batch(
        2,
        base=1,
        writes=[(0, 0, (20, 21))],
        copy=[(0, 20), (1, 21)],
        work=[WorkRow(0, len(PROMPT), [first])],
    )
    assert await session.tokens(batch) == served.truth([*PROMPT, first])


async def test_swap_brings_kv_back_when_device_blocks_were_reused(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch(blocks=(0, 1)))
    # The other row is computed into the blocks that are swapped out in the same step.
    swapped = served.sender.batch(
        2,
        base=1,
        new=[NewRow(1, (1, 0))],
        swap_out=[(0, 5), (1, 2)],
        work=[WorkRow(1, 0, OTHER)],
    )
    assert await session.tokens(swapped) == served.truth(OTHER)
    back = served.sender.batch(
        3,
        base=2,
        writes=[(0, 0, (7, 8))],
        swap_in=[(5, 7), (2, 8)],
        work=[WorkRow(0, len(PROMPT), [first])],
    )
    assert await session.tokens(back) == served.truth([*PROMPT, first])


async def test_swap_out_precedes_swap_in_when_both_name_one_block(
    served: Served,
) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch(blocks=(0, 1)))
    await session.tokens(served.sender.batch(2, base=1, swap_out=[(0, 0), (1, 1)]))
    [other] = await session.tokens(
        served.sender.batch(3, base=2, new=[NewRow(1, (0, 1))], work=[WorkRow(1, 0, OTHER)])
    )
    # Device 0, 1 hold OTHER, host 0, 1 hold PROMPT: they change places through the order alone.
    exchanged = served.sender.batch(
        4,
        base=3,
        writes=[(1, 0, (10, 11))],
        swap_out=[(0, 2), (1, 3)],
        swap_in=[(0, 0), (1, 1), (2, 10), (3, 11)],
        work=[WorkRow(0, len(PROMPT), [first]), WorkRow(1, len(OTHER), [other])],
    )
    assert await session.tokens(exchanged) == [
        *served.truth([*PROMPT, first]),
        *served.truth([*OTHER, other]),
    ]


@pytest.mark.parametrize("phase", ["swap_out", "swap_in", "copy"])
async def test_timings_tell_moving_from_computing_when_a_step_does_both(
    served: Served, phase: str
) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch(blocks=(0, 1)))
    batch = served.sender.batch(2, base=1, new=[NewRow(1, (7, 8))], work=[WorkRow(1, 0, OTHER)])
    moves = getattr(batch, phase)
    moves.source_block_ids, moves.destination_block_ids = i32([0, 1, 2]), i32([5, 4, 3])
    timings = (await session.execute(batch)).timings
    assert timings.move_us > 0
    assert timings.forward_us > 0


async def test_copy_follows_swap_in_when_its_source_is_swapped_in(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch(blocks=(0, 1)))
    await session.tokens(served.sender.batch(2, base=1, swap_out=[(0, 0), (1, 1)]))
    batch = served.sender.batch(
        3,
        base=2,
        writes=[(0, 0, (14, 15))],
        swap_in=[(0, 12), (1, 13)],
        copy=[(12, 14), (13, 15)],
        work=[WorkRow(0, len(PROMPT), [first])],
    )
    assert await session.tokens(batch) == served.truth([*PROMPT, first])


async def test_copy_feeds_all_when_one_source_has_several_destinations(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch(blocks=(0, 1)))
    forks = [NewRow(1, (0, 21), num_prompt=6), NewRow(2, (0, 22), num_prompt=6)]
    batch = served.sender.batch(
        2,
        base=1,
        new=forks,
        copy=[(1, 21), (1, 22)],
        work=[
            WorkRow(0, len(PROMPT), [first]),
            WorkRow(1, len(PROMPT), [50]),
            WorkRow(2, len(PROMPT), [60]),
        ],
    )
    assert await session.tokens(batch) == [
        *served.truth([*PROMPT, first]),
        *served.truth([*PROMPT, 50]),
        *served.truth([*PROMPT, 60]),
    ]


@pytest.mark.parametrize("reader_first", [False, True])
async def test_row_reads_block_that_another_row_fills_meanwhile(
    served: Served, reader_first: bool
) -> None:
    new = [NewRow(0, (0, 1, 2)), NewRow(1, (0, 1, 6))]
    work = [
        WorkRow(0, 0, LONG),
        WorkRow(1, 2 * BLOCK_SIZE, [1, 2, 3]),
    ]
    truth = served.truth(LONG) + served.truth([*LONG[: 2 * BLOCK_SIZE], 1, 2, 3])
    order = (1, 0) if reader_first else (0, 1)
    batch = served.sender.batch(1, new=new, work=[work[i] for i in order])
    assert await served.open().tokens(batch) == [truth[i] for i in order]


async def test_step_computes_rows_in_order_when_ids_are_not_sorted(served: Served) -> None:
    prompts = {5: PROMPT, 2: OTHER, 7: LONG}
    new = [NewRow(row, range(4 * row, 4 * row + 3)) for row in (2, 5, 7)]
    batch = served.sender.batch(1, new=new, work=[WorkRow(r, 0, p) for r, p in prompts.items()])
    expected = [token for prompt in prompts.values() for token in served.truth(prompt)]
    assert await served.open().tokens(batch) == expected


async def test_table_write_extends_when_a_row_needs_its_next_block(served: Served) -> None:
    session = served.open()
    sequence = [*PROMPT[:BLOCK_SIZE]]
    batch = served.sender.batch(1, new=[NewRow(0, (3,))], work=[WorkRow(0, 0, sequence)])
    for step_id in range(2, 8):
        sequence += await session.tokens(batch)
        position = len(sequence) - 1
        at_boundary = position % BLOCK_SIZE == 0
        batch = served.sender.batch(
            step_id,
            base=step_id - 1,
            writes=[(0, position // BLOCK_SIZE, (20 + step_id,))] if at_boundary else (),
            work=[WorkRow(0, position, sequence[-1:])],
        )
    assert sequence == PROMPT[:BLOCK_SIZE] + served.truth(PROMPT[:BLOCK_SIZE], 6)


async def test_row_is_new_when_its_id_is_reused_at_once(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    batch = served.sender.batch(
        2, base=1, removed=[0], new=[NewRow(0, (8, 9))], work=[WorkRow(0, 0, OTHER)]
    )
    assert await session.tokens(batch) == served.truth(OTHER)


async def test_result_has_empty_columns_when_there_is_no_work(served: Served) -> None:
    result = await served.open().execute(served.sender.batch(1, new=[NewRow(0, (0,))]))
    assert (result.sampled_token_ids, result.row_statuses) == (b"", b"")


async def test_step_runs_when_it_is_at_all_limits(served: Served) -> None:
    rows = range(8)
    new = [NewRow(row, (2 * row, 2 * row + 1)) for row in rows]
    prompts = [[(row + i) % 100 for i in range(MAX_NUM_BATCHED_TOKENS // 8)] for row in rows]
    batch = served.sender.batch(1, new=new, work=[WorkRow(row, 0, prompts[row]) for row in rows])
    expected = [token for prompt in prompts for token in served.truth(prompt)]
    assert await served.open().tokens(batch) == expected
