"""Encoder tokens: encoded once, read by all rows of a request, moved like other blocks."""

from __future__ import annotations

from tests.contract.served import PROMPT, Served
from tests.support.steps.batches import NewRow, WorkRow, i32

ENCODER = [31, 41, 59, 26, 53, 58]
OTHER = [2, 7, 18]
CROSS = (20, 21)


def _row(row_id: int, blocks: tuple[int, ...], *, brings: bool) -> NewRow:
    """A row with ENCODER, which it brings to be encoded or finds in its cross blocks."""
    return NewRow(
        row_id,
        blocks,
        num_prompt=len(PROMPT),
        cross_blocks=CROSS,
        encoder=ENCODER if brings else (),
        num_encoder=len(ENCODER),
    )


async def test_token_depends_on_encoder_when_the_row_has_one(served_all: Served) -> None:
    session, served = served_all.open(), served_all
    other = NewRow(1, (2, 3), cross_blocks=(22,), encoder=OTHER)
    new = [_row(0, (0, 1), brings=True), other, NewRow(2, (4, 5))]
    work = [WorkRow(row, 0, PROMPT) for row in range(3)]
    expected = [
        *served.truth(PROMPT, encoder=ENCODER),
        *served.truth(PROMPT, encoder=OTHER),
        *served.truth(PROMPT),
    ]
    assert await session.tokens(served.sender.batch(1, new=new, work=work)) == expected


async def test_encoder_is_shared_when_one_row_brings_it(
    served_all: Served,
) -> None:
    session, served = served_all.open(), served_all
    new = [_row(0, (0, 1), brings=False), _row(1, (2, 3), brings=True)]
    work = [WorkRow(row, 0, PROMPT) for row in range(2)]
    [token, twin] = await session.tokens(served.sender.batch(1, new=new, work=work))
    assert [token, twin] == served.truth(PROMPT, encoder=ENCODER) * 2


async def test_encoder_runs_once_when_a_prompt_comes_in_chunks(
    served_all: Served,
) -> None:
    session, served = served_all.open(), served_all
    await session.tokens(served.sender.batch(1, new=[_row(0, (0, 1), brings=True)]))
    work = [WorkRow(0, 0, PROMPT[:4], samples=False)]
    await session.tokens(served.sender.batch(2, base=1, work=work))
    # Encoded again, this would be what row 0 reads.
    intruder = NewRow(1, (2,), cross_blocks=(22, 23), encoder=ENCODER)
    batch = served.sender.batch(
        3,
        base=2,
        new=[intruder],
        work=[WorkRow(1, 0, [5]), WorkRow(0, 4, PROMPT[4:])],
    )
    tokens = await session.tokens(batch)
    assert tokens == [*served.truth([5], encoder=ENCODER), *served.truth(PROMPT, encoder=ENCODER)]


async def test_encoder_runs_not_again_when_its_block_was_moved(
    served_all: Served,
) -> None:
    session, served = served_all.open(), served_all
    first = served.sender.batch(1, new=[_row(0, (0, 1), brings=True)], work=[WorkRow(0, 0, PROMPT)])
    [token] = await session.tokens(first)
    # The cross blocks move; the row that read them would spoil block 20 if it encoded again.
    moved = NewRow(3, (0, 1), 6, cross_blocks=(10, 11), num_encoder=len(ENCODER))
    batch = served.sender.batch(
        2,
        base=1,
        removed=[0],
        new=[moved, NewRow(4, (20, 21))],
        copy=[(20, 10), (21, 11)],
        work=[WorkRow(4, 0, PROMPT), WorkRow(3, len(PROMPT), [token])],
    )
    assert await session.tokens(batch) == [
        *served.truth(PROMPT),
        *served.truth([*PROMPT, token], encoder=ENCODER),
    ]


async def test_encoder_comes_back_when_its_blocks_were_swapped(served_all: Served) -> None:
    session, served = served_all.open(), served_all
    first = served.sender.batch(1, new=[_row(0, (0, 1), brings=True)], work=[WorkRow(0, 0, PROMPT)])
    [token] = await session.tokens(first)
    await session.tokens(
        served.sender.batch(
            2,
            base=1,
            removed=[0],
            new=[NewRow(1, (0, 1)), NewRow(2, CROSS)],
            swap_out=[(0, 0), (1, 1), (20, 2), (21, 3)],
            work=[WorkRow(1, 0, [*OTHER, *OTHER]), WorkRow(2, 0, [*OTHER, *OTHER])],
        )
    )
    back = NewRow(0, (7, 8), 6, cross_blocks=(9, 10), num_encoder=len(ENCODER))
    batch = served.sender.batch(
        3,
        base=2,
        new=[back],
        swap_in=[(0, 7), (1, 8), (2, 9), (3, 10)],
        work=[WorkRow(0, len(PROMPT), [token])],
    )
    assert await session.tokens(batch) == served.truth([*PROMPT, token], encoder=ENCODER)


async def test_columns_may_say_nothing_when_no_row_has_an_encoder(served: Served) -> None:
    """Spelled out, they mean the same as empty, and need no feature."""
    batch = served.sender.batch(1, new=[NewRow(0, (0, 1))], work=[WorkRow(0, 0, PROMPT)])
    batch.new_rows.num_encoder_tokens = i32([0])
    batch.new_rows.cross_block_offsets = i32([0, 0])
    batch.new_rows.encoder_offsets = i32([0, 0])
    batch.new_rows.adapter_indexes = i32([-1])
    assert await served.open().tokens(batch) == served.truth(PROMPT)
