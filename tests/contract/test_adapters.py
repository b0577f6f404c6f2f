"""Rows with adapters: which weights a row gets, and how many adapters a step may have."""

from __future__ import annotations

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import MAX_ADAPTERS_PER_STEP, PROMPT, Served
from tests.support.steps.batches import NewRow, WorkRow

NAMES = ["", "french", "", "pirate"]


def _rows(*names: str) -> list[NewRow]:
    return [NewRow(i, (2 * i, 2 * i + 1), num_prompt=6, adapter=n) for i, n in enumerate(names)]


async def test_rows_have_their_own_adapters_when_they_share_a_step(served_all: Served) -> None:
    session, served = served_all.open(), served_all
    work = [WorkRow(row, 0, PROMPT) for row in (3, 0, 2, 1)]
    batch = served.sender.batch(1, new=_rows(*NAMES), work=work)
    expected = [served.truth(PROMPT, adapter=NAMES[row])[0] for row in (3, 0, 2, 1)]
    assert await session.tokens(batch) == expected
    assert len(set(expected)) == 3


async def test_row_keeps_its_adapter_in_later_batches(served_all: Served) -> None:
    session, served = served_all.open(), served_all
    work = [WorkRow(row, 0, PROMPT) for row in range(2)]
    await session.tokens(served.sender.batch(1, new=_rows(*NAMES[:2]), work=work))
    work = [WorkRow(row, len(PROMPT), back=1) for row in range(2)]
    tokens = await session.tokens(served.sender.batch(2, base=1, work=work))
    assert tokens == [served.truth(PROMPT, 2, adapter=name)[1] for name in NAMES[:2]]


async def test_row_has_no_adapter_when_its_id_had_one_before(served_all: Served) -> None:
    session, served = served_all.open(), served_all
    work = [WorkRow(0, 0, PROMPT)]
    await session.tokens(served.sender.batch(1, new=_rows("french"), work=work))
    batch = served.sender.batch(2, base=1, removed=[0], new=_rows(""), work=work)
    assert await session.tokens(batch) == served.truth(PROMPT)


async def test_adapters_count_by_name_when_rows_come_in_several_batches(
    served_all: Served,
) -> None:
    session, served = served_all.open(), served_all
    blocks = iter(range(30))
    names = ["a", "b", "a", "", "c"]
    for row_id, name in enumerate(names):
        new = [NewRow(row_id, (next(blocks), next(blocks)), adapter=name)]
        base = row_id if row_id else None
        await session.tokens(served.sender.batch(row_id + 1, base=base, new=new))
    work = [WorkRow(row, 0, PROMPT) for row in range(5)]
    result = await session.execute(served.sender.batch(6, base=5, work=work))
    assert (result.error.reason, result.error.field) == (
        pb.STEP_ERROR_REASON_LIMIT_EXCEEDED,
        "work.row_ids",
    )
    tokens = await session.tokens(served.sender.batch(6, base=5, work=work[:4]))
    assert len({name for name in names[:4] if name}) == MAX_ADAPTERS_PER_STEP
    assert tokens == [served.truth(PROMPT, adapter=name)[0] for name in names[:4]]


async def test_adapters_count_after_rows_were_replaced(
    served_all: Served,
) -> None:
    session, served = served_all.open(), served_all
    await session.tokens(served.sender.batch(1, new=_rows("a", "b", "c")))
    work = [WorkRow(row, 0, PROMPT) for row in range(3)]
    replaced = [NewRow(2, (8, 9), num_prompt=6, adapter="b")]
    batch = served.sender.batch(2, base=1, removed=[2], new=replaced, work=work)
    tokens = await session.tokens(batch)
    assert tokens == [served.truth(PROMPT, adapter=name)[0] for name in "abb"]
