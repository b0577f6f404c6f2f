"""Blocks behind the model's window: nobody misses them, and what they hold does not matter."""

from __future__ import annotations

import itertools

import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import BLOCK_SIZE, NAN_TOKEN, PROMPT, SLIDING_WINDOW, Served
from tests.support.steps.batches import NewRow, WorkRow, read_i32

LONG = [(7 * i + 3) % 150 for i in range(18)]
BLOCKS = (3, 9, 1, 12, 7, 20, 5)


def _num_behind(num_computed: int) -> int:
    """How many blocks a row whose next token is at `num_computed` does not need."""
    return max(0, num_computed - SLIDING_WINDOW + 1) // BLOCK_SIZE


async def test_info_says_the_window_when_every_layer_has_it(served_window: Served) -> None:
    info = (await served_window.stub.GetInfo(pb.GetInfoRequest())).executor
    assert info.model.sliding_window_tokens == SLIDING_WINDOW


@pytest.mark.parametrize("chunk", [1, 4, 7, 18])
async def test_blocks_behind_the_window_may_get_new_owners(
    served_window: Served, chunk: int
) -> None:
    """Another row fills each block with NaN as soon as row 0 does not need it; 0 names it still."""
    session, served = served_window.open(), served_window
    sequence, num_computed, num_taken = list(LONG), 0, 0
    new = [NewRow(0, BLOCKS, num_prompt=len(LONG))]
    for step_id in itertools.count(1):
        pending = sequence[num_computed:][:chunk]
        num_behind = _num_behind(num_computed)
        takers = [NewRow(1 + i, (BLOCKS[i],)) for i in range(num_taken, num_behind)]
        num_computed, num_taken = num_computed + len(pending), num_behind
        samples = num_computed == len(sequence)
        work = [WorkRow(0, num_computed - len(pending), pending, samples=samples)]
        work += [WorkRow(row.row_id, 0, [NAN_TOKEN] * BLOCK_SIZE) for row in takers]
        base = step_id - 1 if step_id > 1 else None
        batch = served.sender.batch(step_id, base=base, new=[*new, *takers], work=work)
        result, new = await session.execute(batch), []
        assert result.status == pb.STEP_STATUS_OK, result
        if samples:
            sequence.append(read_i32(result.sampled_token_ids)[0])
        if len(sequence) == 26:
            break
    assert sequence == LONG + served.truth(LONG, 8)
    assert num_taken == 5


async def test_row_returns_without_blocks_behind_the_window(
    served_window: Served,
) -> None:
    session, served = served_window.open(), served_window
    first = served.sender.batch(1, new=[NewRow(0, BLOCKS)], work=[WorkRow(0, 0, LONG)])
    sequence = LONG + await session.tokens(first)
    for step_id in itertools.count(2):
        position = len(sequence) - 1
        num_behind = _num_behind(position)
        table = [-1] * num_behind + list(BLOCKS[num_behind:])
        # A snapshot every time.
        batch = served.sender.batch(
            step_id, new=[NewRow(4, table)], work=[WorkRow(4, position, sequence[-1:])]
        )
        sequence += await session.tokens(batch)
        if len(sequence) == 26:
            break
    assert sequence == LONG + served.truth(LONG, 8)


async def test_tokens_are_right_when_table_writes_take_blocks_away(served_window: Served) -> None:
    session, served = served_window.open(), served_window
    batch = served.sender.batch(1, new=[NewRow(0, BLOCKS[:5])], work=[WorkRow(0, 0, LONG)])
    [first] = await session.tokens(batch)
    batch = served.sender.batch(
        2, base=1, writes=[(0, 0, (-1, -1, -1))], work=[WorkRow(0, len(LONG), [first])]
    )
    [second] = await session.tokens(batch)
    batch = served.sender.batch(3, base=2, work=[WorkRow(0, len(LONG) + 1, [second])])
    assert [first, second, *await session.tokens(batch)] == served.truth(LONG, 3)


async def test_row_is_computed_when_missing_blocks_are_filled_in(
    served_window: Served,
) -> None:
    session, served = served_window.open(), served_window
    batch = served.sender.batch(1, new=[NewRow(0, (-1, -1, 6))])
    await session.tokens(batch)
    batch = served.sender.batch(2, base=1, work=[WorkRow(0, 0, PROMPT)])
    refused = await session.execute(batch)
    assert refused.error.reason == pb.STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE
    batch = served.sender.batch(2, base=1, writes=[(0, 0, (4, 8))], work=[WorkRow(0, 0, PROMPT)])
    assert await session.tokens(batch) == served.truth(PROMPT)


async def test_row_is_refused_when_only_the_last_missing_block_matters(
    served_window: Served,
) -> None:
    session, served = served_window.open(), served_window
    table = (-1, -1, 6, 7)
    await session.tokens(served.sender.batch(1, new=[NewRow(0, (2, 3, 6))]))
    await session.tokens(served.sender.batch(2, base=1, work=[WorkRow(0, 0, LONG[:12])]))
    add = {"removed": [0], "new": [NewRow(0, table)]}
    # The token at position 11 reads from position 7 on.
    batch = served.sender.batch(3, base=2, work=[WorkRow(0, 11, LONG[11:12])], **add)  # type: ignore[arg-type]
    refused = await session.execute(batch)
    assert (refused.error.reason, refused.error.field) == (
        pb.STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE,
        "work.row_ids",
    )
    batch = served.sender.batch(3, base=2, work=[WorkRow(0, 12, LONG[12:13])], **add)  # type: ignore[arg-type]
    assert await session.tokens(batch) == served.truth(LONG[:13])
