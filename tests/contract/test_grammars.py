"""Rows with grammars: what is written and told while one is compiled, and who pays for a bad one.

Over the fake, whose grammars are of token ids (`fake_model`) and whose first row for each has to
ask again.
"""

from __future__ import annotations

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import EOS_TOKEN_IDS, PROMPT, Served, Session
from tests.support.steps.batches import NewRow, WorkRow, read_i32

OTHER = [80, 3, 3, 51, 29]
OK, NOT_SAMPLED = pb.ROW_STATUS_OK, pb.ROW_STATUS_NOT_SAMPLED
NUM_PROMPT = len(PROMPT)


def row(*texts: str, row_id: int = 0, output: tuple[int, ...] = (), **params: object) -> NewRow:
    """A new row of PROMPT whose output is one of `texts`; it has `output` already."""
    first = 4 * row_id
    params["grammar"] = pb.Grammar(choices=pb.Choices(texts=texts))
    history = [*PROMPT, *output]
    return NewRow(row_id, range(first, first + 4), NUM_PROMPT, params, history=history)


async def execute(session: Session, batch: pb.ScheduleBatch) -> tuple[list[int], list[int]]:
    """Statuses, which may be none, and tokens of a step."""
    result = await session.execute(batch)
    assert result.status == pb.STEP_STATUS_OK, result
    return list(result.row_statuses), read_i32(result.sampled_token_ids)


async def test_row_is_sampled_when_its_last_token_is_sent_again(served_all: Served) -> None:
    session, batch = served_all.open(), served_all.sender.batch
    new = [row("30 31"), NewRow(1, (10, 11))]
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, OTHER)]
    statuses, tokens = await execute(session, batch(1, new=new, work=work))
    assert statuses == [NOT_SAMPLED, OK]
    assert tokens == [-1, *served_all.truth(OTHER)]
    work = [WorkRow(1, len(OTHER), back=1), WorkRow(0, NUM_PROMPT - 1, PROMPT[-1:])]
    statuses, tokens = await execute(session, batch(2, base=1, work=work))
    assert statuses == []
    assert tokens == [served_all.truth(OTHER, 2)[-1], 30]


async def test_output_follows_its_grammar_when_steps_are_sent_ahead(
    served_all: Served,
) -> None:
    session, batch = served_all.open(), served_all.sender.batch
    await execute(session, batch(1, new=[row("30 31 32")], work=[WorkRow(0, 0, PROMPT)]))
    again = WorkRow(0, NUM_PROMPT - 1, PROMPT[-1:])
    await session.send(batch(2, base=1, work=[again]))
    await session.send(batch(3, base=2, work=[WorkRow(0, NUM_PROMPT, back=1)]))
    await session.send(batch(4, base=3, work=[WorkRow(0, NUM_PROMPT + 1, back=1)]))
    results = [await session.receive() for _ in range(3)]
    assert [read_i32(result.sampled_token_ids) for result in results] == [[30], [31], [32]]
    work = [WorkRow(0, NUM_PROMPT + 2, back=1)]
    _, tokens = await execute(session, batch(5, base=4, work=work))
    assert tokens == [EOS_TOKEN_IDS[0]]  # nothing else can follow


async def test_prompt_logprobs_and_slots_are_there_when_no_token_is(served_all: Served) -> None:
    session, batch = served_all.open(), served_all.sender.batch
    new = [row("30", num_prompt_logprobs=0)]
    result = await session.execute(batch(1, new=new, work=[WorkRow(0, 0, PROMPT)]))
    assert list(result.row_statuses) == [NOT_SAMPLED]
    assert read_i32(result.prompt_logprobs.positions) == list(range(1, NUM_PROMPT))
    # Another row reads what it has written, all but the last of it.
    reader = NewRow(1, (0, 9))
    work = [WorkRow(1, NUM_PROMPT - 2, PROMPT[-2:])]
    copy = [(1, 9)]
    _, tokens = await execute(session, batch(2, base=1, new=[reader], copy=copy, work=work))
    assert tokens == served_all.truth(PROMPT)


async def test_row_has_no_input_when_it_was_not_sampled(served_all: Served) -> None:
    session, batch = served_all.open(), served_all.sender.batch
    await execute(session, batch(1, new=[row("30")], work=[WorkRow(0, 0, PROMPT)]))
    work = [WorkRow(0, NUM_PROMPT, back=1)]
    statuses, _ = await execute(session, batch(2, base=1, work=work))
    assert statuses == [pb.ROW_STATUS_INPUT_UNAVAILABLE]


async def test_output_goes_on_when_its_row_comes_again(served_all: Served) -> None:
    session, batch = served_all.open(), served_all.sender.batch
    texts = ("30 31", "40 41")
    await execute(session, batch(1, new=[row(*texts)], work=[WorkRow(0, 0, PROMPT)]))
    for step_id, (output, expected) in enumerate([((30,), 31), ((40,), 41), ((40, 41), 2)], 2):
        new = [row(*texts, output=output)]
        work = [WorkRow(0, 0, [*PROMPT, *output])]
        _, tokens = await execute(session, batch(step_id, new=new, work=work))
        assert tokens == [expected]


async def test_row_pays_alone_when_its_grammar_is_invalid(served_all: Served) -> None:
    session, batch = served_all.open(), served_all.sender.batch
    new = [row("!"), row("30", row_id=1, output=(31,)), NewRow(2, (12, 13))]
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, [*PROMPT, 31]), WorkRow(2, 0, OTHER)]
    statuses, tokens = await execute(session, batch(1, new=new, work=work))
    assert tokens == [-1, -1, *served_all.truth(OTHER)]
    work = [WorkRow(0, NUM_PROMPT - 1, PROMPT[-1:]), WorkRow(1, NUM_PROMPT, [31])]
    statuses, tokens = await execute(session, batch(2, base=1, work=work))
    assert statuses == [pb.ROW_STATUS_GRAMMAR_INVALID] * 2
    assert tokens == [-1, -1]
