"""Rows: tokens of earlier steps, failures that stay with their row, histories, logprobs."""

from __future__ import annotations

import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import BROKEN_TOKEN, NAN_TOKEN, PROMPT, VOCAB_SIZE, Served
from tests.support.steps.batches import NewRow, WorkRow, read_f32, read_i32

OTHER = [80, 3, 3, 51, 29]
UNAVAILABLE = pb.ROW_STATUS_INPUT_UNAVAILABLE


# -- tokens of earlier steps -----------------------------------------------------------------------


async def test_tokens_are_right_when_steps_are_sent_ahead(served: Served) -> None:
    session = served.open()
    await session.send(served.prompt_batch())
    for step_id in (2, 3):
        position = len(PROMPT) + step_id - 2
        await session.send(
            served.sender.batch(step_id, base=step_id - 1, work=[WorkRow(0, position, back=1)])
        )
    results = [await session.receive() for _ in range(3)]
    tokens = [read_i32(result.sampled_token_ids)[0] for result in results]
    assert tokens == served.truth(PROMPT, 3)


async def test_token_is_found_when_it_was_sampled_several_steps_ago(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch())
    for step_id in (2, 3, 4, 5):
        await session.tokens(served.sender.batch(step_id, base=step_id - 1))
    batch = served.sender.batch(6, base=5, work=[WorkRow(0, len(PROMPT), back=5)])
    assert await session.tokens(batch) == served.truth([*PROMPT, first])


async def test_older_token_is_found_when_the_row_sampled_again_since(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch())
    await session.tokens(served.sender.batch(2, base=1, work=[WorkRow(0, len(PROMPT), back=1)]))
    # The token of step 1 again, at its position.
    batch = served.sender.batch(3, base=2, work=[WorkRow(0, len(PROMPT), back=2)])
    assert await session.tokens(batch) == served.truth([*PROMPT, first])


async def test_rows_get_their_own_input_when_kinds_are_mixed(
    served: Served,
) -> None:
    session = served.open()
    new = [NewRow(0, (0, 1)), NewRow(1, (2, 3)), NewRow(2, (4, 5))]
    work = [WorkRow(0, 0, PROMPT), WorkRow(2, 0, OTHER)]
    first, second = await session.tokens(served.sender.batch(1, new=new, work=work))
    work = [
        WorkRow(2, len(OTHER), back=1),
        WorkRow(1, 0, [9, 8, 7]),
        WorkRow(0, len(PROMPT), back=1),
    ]
    assert await session.tokens(served.sender.batch(2, base=1, work=work)) == [
        *served.truth([*OTHER, second]),
        *served.truth([9, 8, 7]),
        *served.truth([*PROMPT, first]),
    ]


async def test_rows_get_tokens_of_different_earlier_steps(served: Served) -> None:
    session = served.open()
    new = [NewRow(0, (0, 1)), NewRow(1, (2, 3))]
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, OTHER)]
    first, second = await session.tokens(served.sender.batch(1, new=new, work=work))
    work = [WorkRow(1, len(OTHER), back=1)]
    [third] = await session.tokens(served.sender.batch(2, base=1, work=work))
    work = [WorkRow(0, len(PROMPT), back=2), WorkRow(1, len(OTHER) + 1, back=1)]
    assert await session.tokens(served.sender.batch(3, base=2, work=work)) == [
        *served.truth([*PROMPT, first]),
        *served.truth([*OTHER, second, third]),
    ]


@pytest.mark.parametrize("back", [1, 3, 2**31 - 1])
async def test_row_fails_alone_when_its_input_was_never_sampled(served: Served, back: int) -> None:
    session = served.open()
    new = [NewRow(0, (0, 1)), NewRow(1, (2, 3)), NewRow(2, (4,))]
    work = [WorkRow(0, 0, PROMPT), WorkRow(2, 0, [1], samples=False)]
    [first, _] = await session.tokens(served.sender.batch(1, new=new, work=work))
    work = [
        WorkRow(1, 0, OTHER),
        WorkRow(2, 1, back=back),
        WorkRow(0, len(PROMPT), [first]),
    ]
    result = await session.execute(served.sender.batch(2, base=1, work=work))
    assert list(result.row_statuses) == [pb.ROW_STATUS_OK, UNAVAILABLE, pb.ROW_STATUS_OK]
    assert read_i32(result.sampled_token_ids) == [
        *served.truth(OTHER),
        -1,
        *served.truth([*PROMPT, first]),
    ]


async def test_error_names_the_row_when_its_input_is_unavailable(served: Served) -> None:
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, back=1)]
    batch = served.sender.batch(1, new=[NewRow(0, (0, 1)), NewRow(1, (2,))], work=work)
    result = await served.open().execute(batch)
    assert [error.row_index for error in result.row_errors] == [1]


async def test_blocks_move_when_no_row_has_its_input(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch())
    result = await session.execute(
        served.sender.batch(
            2, base=1, new=[NewRow(1, (9,))], copy=[(0, 20), (1, 21)], work=[WorkRow(1, 0, back=1)]
        )
    )
    assert list(result.row_statuses) == [UNAVAILABLE]
    batch = served.sender.batch(
        3, base=2, writes=[(0, 0, (20, 21))], work=[WorkRow(0, len(PROMPT), [first])]
    )
    assert await session.tokens(batch) == served.truth([*PROMPT, first])


async def test_tokens_are_forgotten_when_the_row_is_new_again(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    batch = served.sender.batch(
        2, base=1, removed=[0], new=[NewRow(0, (0, 1))], work=[WorkRow(0, len(PROMPT), back=1)]
    )
    assert list((await session.execute(batch)).row_statuses) == [UNAVAILABLE]


async def test_input_is_unavailable_when_its_step_failed_for_the_row(served: Served) -> None:
    session = served.open()
    batch = served.sender.batch(1, new=[NewRow(0, (0,))], work=[WorkRow(0, 0, [5, NAN_TOKEN])])
    await session.execute(batch)
    result = await session.execute(served.sender.batch(2, base=1, work=[WorkRow(0, 2, back=1)]))
    assert list(result.row_statuses) == [UNAVAILABLE]


# -- failures of a row -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "status"),
    [(NAN_TOKEN, pb.ROW_STATUS_INVALID_LOGITS), (BROKEN_TOKEN, pb.ROW_STATUS_FAILED)],
)
async def test_row_fails_alone_when_one_of_its_tokens_breaks_it(
    served: Served, token: int, status: pb.RowStatus
) -> None:
    new = [NewRow(0, (0, 1)), NewRow(1, (2, 3)), NewRow(2, (4, 5))]
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, [4, token, 6]), WorkRow(2, 0, OTHER)]
    result = await served.open().execute(served.sender.batch(1, new=new, work=work))
    assert list(result.row_statuses) == [pb.ROW_STATUS_OK, status, pb.ROW_STATUS_OK]
    tokens = [*served.truth(PROMPT), -1, *served.truth(OTHER)]
    assert read_i32(result.sampled_token_ids) == tokens
    assert [(error.row_index, bool(error.message)) for error in result.row_errors] == [(1, True)]


async def test_row_recovers_when_its_blocks_are_written_again(served: Served) -> None:
    session = served.open()
    spoil = served.sender.batch(
        1, new=[NewRow(0, (0, 1))], work=[WorkRow(0, 0, [NAN_TOKEN, *PROMPT[1:]])]
    )
    assert list((await session.execute(spoil)).row_statuses) == [pb.ROW_STATUS_INVALID_LOGITS]
    batch = served.sender.batch(2, base=1, work=[WorkRow(0, 0, PROMPT)])
    assert await session.tokens(batch) == served.truth(PROMPT)


async def test_row_is_unaffected_when_an_unread_block_is_spoiled(
    served: Served,
) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch(blocks=(0, 1)))
    # Shares no position with row 0, but its last block was one that row 0 does not fill.
    work = [WorkRow(1, 0, [NAN_TOKEN]), WorkRow(0, len(PROMPT), [first])]
    batch = served.sender.batch(2, base=1, new=[NewRow(1, (7,))], work=work)
    result = await session.execute(batch)
    tokens = read_i32(result.sampled_token_ids)
    assert tokens == [-1, *served.truth([*PROMPT, first])]


# -- sampling, histories, logprobs -----------------------------------------------------------------


async def test_sampled_token_does_not_depend_on_other_rows(served: Served) -> None:
    session = served.open()
    row = NewRow(0, (0, 1), num_prompt=6, params={"temperature": 1.5}, seed=-77)
    alone = await session.tokens(served.sender.batch(1, new=[row], work=[WorkRow(0, 0, PROMPT)]))
    others = [NewRow(i, (2 * i, 2 * i + 1), params={"temperature": 0.7}) for i in (1, 2, 3)]
    work = [*(WorkRow(i, 0, OTHER) for i in (3, 1)), WorkRow(0, 0, PROMPT), WorkRow(2, 0, OTHER)]
    together = await session.tokens(served.sender.batch(2, new=[*others, row], work=work))
    assert together[2] == alone[0]


async def test_tokens_differ_when_seeds_differ(served: Served) -> None:
    rows = [NewRow(i, (2 * i, 2 * i + 1), params={"temperature": 30.0}, seed=i) for i in range(8)]
    work = [WorkRow(i, 0, PROMPT) for i in range(8)]
    tokens = await served.open().tokens(served.sender.batch(1, new=rows, work=work))
    assert len(set(tokens)) > 1


async def test_history_follows_when_tokens_are_sampled(served: Served) -> None:
    """A penalty that is large enough forbids what was said, so nothing is said twice."""
    session = served.open()
    params = {"presence_penalty": 2.0, "logit_bias": {5: 0.5}, "num_logprobs": 0}
    row = NewRow(0, (0, 1, 2, 3), num_prompt=6, params=params, history=PROMPT)
    tokens = await session.tokens(served.sender.batch(1, new=[row], work=[WorkRow(0, 0, PROMPT)]))
    for step_id in range(2, 7):
        position = len(PROMPT) + step_id - 2
        batch = served.sender.batch(step_id, base=step_id - 1, work=[WorkRow(0, position, back=1)])
        tokens += await session.tokens(batch)
    # The same at once: all tokens known, prompt and output.
    rows = NewRow(1, (8, 9, 10, 11), num_prompt=6, params=params, history=[*PROMPT, *tokens[:-1]])
    batch = served.sender.batch(
        7, base=6, new=[rows], work=[WorkRow(1, 0, [*PROMPT, *tokens[:-1]])]
    )
    assert await session.tokens(batch) == tokens[-1:]


async def test_logprobs_come_for_those_rows_when_only_some_ask(served: Served) -> None:
    rows = [NewRow(0, (0, 1)), NewRow(1, (2, 3), params={"num_logprobs": 3}), NewRow(2, (4, 5))]
    work = [WorkRow(2, 0, OTHER), WorkRow(1, 0, PROMPT)]
    result = await served.open().execute(served.sender.batch(1, new=rows, work=work))
    columns = result.logprobs
    assert (
        read_i32(columns.row_indexes),
        read_i32(columns.positions),
        read_i32(columns.token_ids),
        read_i32(columns.ranks),
        read_i32(columns.top_offsets),
        read_i32(columns.top_token_ids)[0],
    ) == ([1], [len(PROMPT)], served.truth(PROMPT), [1], [0, 3], served.truth(PROMPT)[0])
    assert read_f32(columns.logprobs)[0] == pytest.approx(read_f32(columns.top_logprobs)[0])


@pytest.mark.parametrize("num_logprobs", [64, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1])
async def test_logprobs_have_at_most_the_vocabulary_as_alternatives(
    served: Served, num_logprobs: int
) -> None:
    rows = [
        NewRow(0, (0, 1), params={"num_logprobs": num_logprobs}),
        NewRow(1, (2, 3), params={"num_logprobs": 2}),
    ]
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, OTHER)]
    result = await served.open().execute(served.sender.batch(1, new=rows, work=work))
    expected = min(num_logprobs, VOCAB_SIZE)
    assert read_i32(result.logprobs.top_offsets) == [0, expected, expected + 2]
    alternatives = read_i32(result.logprobs.top_token_ids)
    assert len(set(alternatives[:expected])) == expected
    assert len(read_f32(result.logprobs.top_logprobs)) == expected + 2


async def test_logprobs_name_rows_when_one_was_left_out(served: Served) -> None:
    params = {"num_logprobs": 0}
    rows = [NewRow(0, (0, 1), params=params), NewRow(1, (2, 3), params=params)]
    work = [WorkRow(0, 0, back=1), WorkRow(1, 0, PROMPT)]
    result = await served.open().execute(served.sender.batch(1, new=rows, work=work))
    assert read_i32(result.logprobs.row_indexes) == [1]


async def test_prompt_logprobs_are_whole_when_prompt_comes_in_chunks(
    served: Served,
) -> None:
    session = served.open()
    params = {"num_prompt_logprobs": 1}
    new = [NewRow(0, (0, 1), num_prompt=6, params=params, history=PROMPT)]
    first = await session.execute(
        served.sender.batch(1, new=new, work=[WorkRow(0, 0, PROMPT[:4], samples=False)])
    )
    last = await session.execute(served.sender.batch(2, base=1, work=[WorkRow(0, 4, PROMPT[4:])]))
    parts = [first.prompt_logprobs, last.prompt_logprobs]
    assert [read_i32(part.positions) for part in parts] == [[1, 2, 3, 4], [5]]
    assert [token for part in parts for token in read_i32(part.token_ids)] == PROMPT[1:]


async def test_timings_are_set_when_a_step_was_executed(served: Served) -> None:
    result = await served.open().execute(served.prompt_batch())
    assert result.HasField("timings")


async def test_tokens_stay_in_the_vocabulary_when_bias_is_huge(served: Served) -> None:
    row = NewRow(0, (0, 1), params={"logit_bias": {VOCAB_SIZE - 1: -1e30}})
    batch = served.sender.batch(1, new=[row], work=[WorkRow(0, 0, PROMPT)])
    [token] = await served.open().tokens(batch)
    assert 0 <= token < VOCAB_SIZE


# -- token constraints -----------------------------------------------------------------------------


def constrained(row_id: int, history: list[int] | None = None, **params: object) -> NewRow:
    blocks = (4 * row_id, 4 * row_id + 1)
    return NewRow(row_id, blocks, num_prompt=6, params=params, history=history or ())


async def test_token_is_one_of_those_when_only_some_are_allowed(served: Served) -> None:
    [best] = served.truth(PROMPT)
    others = [(best + 1) % VOCAB_SIZE, (best + 5) % VOCAB_SIZE]
    rows = [
        constrained(0, allowed_token_ids=others),
        constrained(1, allowed_token_ids=[*others, best]),
        constrained(2, allowed_token_ids=others, bad_words_token_ids=words([others[0]])),
        constrained(3),
    ]
    batch = served.sender.batch(1, new=rows, work=[WorkRow(i, 0, PROMPT) for i in range(4)])
    tokens = await served.open().tokens(batch)
    assert tokens[0] in others
    assert tokens[1:] == [best, others[1], best]


async def test_token_is_another_when_it_is_forbidden(served: Served) -> None:
    [best] = served.truth(PROMPT)
    rows = [
        constrained(0, logit_bias={best: float("-inf")}),
        constrained(1, bad_words_token_ids=words([best])),
        constrained(2, PROMPT, bad_words_token_ids=words([*PROMPT[-2:], best])),
        # Another end, or longer than all there is: it forbids nothing.
        constrained(3, PROMPT, bad_words_token_ids=words([*PROMPT[:2], best], [1, *PROMPT, best])),
    ]
    batch = served.sender.batch(1, new=rows, work=[WorkRow(i, 0, PROMPT) for i in range(4)])
    tokens = await served.open().tokens(batch)
    assert [token == best for token in tokens] == [False, False, False, True]


async def test_bad_words_hold_when_they_begin_in_flight(
    served: Served,
) -> None:
    session = served.open()
    free = served.truth(PROMPT, 3)
    row = constrained(0, PROMPT, bad_words_token_ids=words(free))
    await session.send(served.sender.batch(1, new=[row], work=[WorkRow(0, 0, PROMPT)]))
    for step_id in (2, 3):
        position = len(PROMPT) + step_id - 2
        work = [WorkRow(0, position, back=1)]
        await session.send(served.sender.batch(step_id, base=step_id - 1, work=work))
    results = [await session.receive() for _ in range(3)]
    tokens = [read_i32(result.sampled_token_ids)[0] for result in results]
    assert tokens[:2] == free[:2]
    assert tokens[2] != free[2]


async def test_row_fails_alone_when_its_params_leave_no_token(served: Served) -> None:
    rows = [
        constrained(0),
        constrained(1, allowed_token_ids=[7], logit_bias={7: float("-inf")}),
    ]
    batch = served.sender.batch(1, new=rows, work=[WorkRow(i, 0, PROMPT) for i in range(2)])
    result = await served.open().execute(batch)
    assert list(result.row_statuses) == [pb.ROW_STATUS_OK, pb.ROW_STATUS_INVALID_LOGITS]
    assert read_i32(result.sampled_token_ids) == [*served.truth(PROMPT), -1]


def words(*sequences: list[int]) -> list[pb.TokenSequence]:
    return [pb.TokenSequence(token_ids=tokens) for tokens in sequences]
