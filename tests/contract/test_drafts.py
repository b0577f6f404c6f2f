"""Rows that bring guesses of their next tokens: the same tokens as without, sooner."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import (
    BLOCK_SIZE,
    BROKEN_TOKEN,
    NAN_TOKEN,
    OUT_OF_MEMORY_TOKEN,
    PROMPT,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    Served,
)
from tests.contract.several import BLOCKS, HARMLESS, NUM_PROMPT, OTHER, one_by_one, prompt_row
from tests.support.steps.batches import NewRow, WorkRow, read_f32, read_i32, runs_of


@pytest.mark.parametrize("is_right", [True, False])
async def test_tokens_are_the_same_when_there_are_drafts(
    served_several: Served, is_right: bool
) -> None:
    session, served = served_several.open(), served_several
    truth = served.truth(PROMPT, 13)
    new = [prompt_row()]
    first = served.sender.batch(1, new=new, work=[WorkRow(0, 0, PROMPT)])
    tokens, most = await session.tokens(first), 1
    for step_id in range(2, 5):
        drafts = truth[len(tokens) :][:2]
        if not is_right:
            drafts[-1] = (drafts[-1] + 1) % VOCAB_SIZE
        # The largest that its position can be, as if all had been taken.
        work = [WorkRow(0, NUM_PROMPT + most - 1, back=1, drafts=drafts, run_on=1)]
        result = await session.execute(served.sender.batch(step_id, base=step_id - 1, work=work))
        (run,) = runs_of(result)
        assert 1 <= len(run) <= 4
        tokens, most = tokens + run, most + 4
    assert tokens == truth[: len(tokens)]


def some_right(truth: list[int], num_right: int, num_drafts: int) -> list[int]:
    """Drafts of which the first ones are `truth`, and the next is not."""
    drafts = truth[:num_drafts]
    if num_right < num_drafts:
        drafts[num_right] = (drafts[num_right] + 1) % VOCAB_SIZE
    return drafts


@pytest.mark.parametrize("num_right", [0, 2, 4])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.5, "top_p": 0.9, "logit_bias": HARMLESS},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.75},
        {"min_tokens": 4, "suppressed_token_ids": list(range(0, VOCAB_SIZE, 2))},
    ],
)
async def test_as_many_tokens_are_taken_as_drafts_are_right_when_they_are_verified(
    served_several: Served, params: dict[str, Any], num_right: int
) -> None:
    session, served = served_several.open(), served_several
    expected = await one_by_one(session, served, 7, **params)
    drafts = some_right(expected, num_right, 4)
    # The first is not known when it is guessed what follows.
    work = [WorkRow(0, 0, PROMPT, drafts=drafts, run_on=2), WorkRow(1, 0, OTHER)]
    new = [prompt_row(**params), NewRow(1, (10, 11, 13))]
    result = await session.execute(served.sender.batch(8, new=new, work=work))
    assert runs_of(result) == [expected[: num_right + 3], served.truth(OTHER)]
    if num_right < 4:
        work = [WorkRow(0, NUM_PROMPT + 6, back=1)]
        result = await session.execute(served.sender.batch(9, base=8, work=work))
        assert runs_of(result) == [expected[num_right + 3 :][:1]]


async def test_bad_words_hold_when_they_begin_among_drafts(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    truth = served.truth(PROMPT, 4)
    words = {"bad_words_token_ids": [pb.TokenSequence(token_ids=truth[1:3])]}
    row = NewRow(0, BLOCKS, NUM_PROMPT, words, history=PROMPT)
    first = served.sender.batch(1, new=[row], work=[WorkRow(0, 0, PROMPT, run_on=3)])
    [expected] = runs_of(await session.execute(first))
    assert (expected[:2], expected[2] == truth[2]) == (truth[:2], False)
    for step_id, (drafts, num_right) in enumerate([(expected[:3], 3), (truth[:3], 2)], 2):
        work = [WorkRow(0, 0, PROMPT, drafts=drafts)]
        result = await session.execute(served.sender.batch(step_id, new=[row], work=work))
        assert runs_of(result) == [expected[: num_right + 1]]


async def test_each_token_has_its_scores_when_drafts_are_right(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    truth = served.truth(PROMPT, 4)
    new = [prompt_row(num_logprobs=2), NewRow(1, (10, 11), params={"num_logprobs": 1})]
    work = [WorkRow(0, 0, PROMPT, run_on=3), WorkRow(1, 0, OTHER, run_on=1)]
    expected = (await session.execute(served.sender.batch(1, new=new, work=work))).logprobs
    drafts = [*truth[:2], (truth[2] + 1) % VOCAB_SIZE]
    work = [
        WorkRow(0, 0, PROMPT, run_on=1, drafts=drafts),
        WorkRow(1, 0, OTHER, drafts=served.truth(OTHER)),
    ]
    scores = (await session.execute(served.sender.batch(2, new=new, work=work))).logprobs
    for name in ("row_indexes", "positions", "token_ids", "ranks", "top_offsets", "top_token_ids"):
        assert read_i32(getattr(scores, name)) == read_i32(getattr(expected, name)), name
    for name in ("logprobs", "top_logprobs"):
        found = read_f32(getattr(scores, name))
        assert found == pytest.approx(read_f32(getattr(expected, name)), abs=1e-4)


async def test_nothing_is_taken_behind_the_end_when_drafts_go_on(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    truth = served.truth(PROMPT, 6)
    end = next(i for i in range(1, 5) if truth[i] not in truth[:i])
    new = [prompt_row(stop_token_ids=[truth[end]], num_logprobs=0)]
    work = [WorkRow(0, 0, PROMPT, drafts=truth[:5], run_on=2)]
    result = await session.execute(served.sender.batch(1, new=new, work=work))
    assert runs_of(result) == [truth[: end + 1]]
    assert read_i32(result.logprobs.token_ids) == truth[: end + 1]
    work = [WorkRow(0, NUM_PROMPT + 7, back=1)]
    result = await session.execute(served.sender.batch(2, base=1, work=work))
    assert list(result.row_statuses) == [pb.ROW_STATUS_INPUT_UNAVAILABLE]


async def test_drafts_go_with_their_rows_when_another_has_no_input(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    truth, other = served.truth(PROMPT), served.truth(OTHER, 5)
    new = [prompt_row(stop_token_ids=truth), NewRow(1, (10, 11, 13)), NewRow(2, (14, 15, 16))]
    work = [WorkRow(0, 0, PROMPT, run_on=1), WorkRow(1, 0, OTHER), WorkRow(2, 0, OTHER)]
    await session.send(served.sender.batch(1, new=new, work=work))
    work = [
        WorkRow(0, NUM_PROMPT + 1, back=1, drafts=[5, 6]),
        WorkRow(1, len(OTHER), back=1, drafts=other[1:4]),
        WorkRow(2, len(OTHER), back=1, drafts=other[1:2]),
    ]
    await session.send(served.sender.batch(2, base=1, work=work))
    assert runs_of(await session.receive()) == [truth, other[:1], other[:1]]
    result = await session.receive()
    statuses = [pb.ROW_STATUS_INPUT_UNAVAILABLE, pb.ROW_STATUS_OK, pb.ROW_STATUS_OK]
    assert list(result.row_statuses) == statuses
    assert runs_of(result) == [[], other[1:], other[1:3]]


@pytest.mark.parametrize("bad_token", [NAN_TOKEN, BROKEN_TOKEN, OUT_OF_MEMORY_TOKEN])
async def test_drafts_harm_nobody_when_they_make_something_go_wrong(
    served_several: Served, bad_token: int
) -> None:
    session, served = served_several.open(), served_several
    truth = served.truth(PROMPT, 4)
    new = [prompt_row(), NewRow(1, (10, 11, 13))]
    work = [
        WorkRow(0, 0, PROMPT, drafts=[truth[0], bad_token, truth[2]], run_on=1),
        WorkRow(1, 0, OTHER, run_on=2),
    ]
    result = await session.execute(served.sender.batch(1, new=new, work=work))
    assert result.row_statuses == b""
    first, second = runs_of(result)
    # If there is no memory for drafts, they are left out.
    num_tokens = 2 if bad_token == OUT_OF_MEMORY_TOKEN else 3
    assert (first, second) == (truth[:num_tokens], served.truth(OTHER, 3))
    work = [WorkRow(0, NUM_PROMPT + 4, back=1)]
    result = await session.execute(served.sender.batch(2, base=1, work=work))
    assert runs_of(result) == [truth[num_tokens:][:1]]


async def test_row_has_its_status_when_its_first_token_cannot_be_sampled(
    served_several: Served,
) -> None:
    session, served = served_several.open(), served_several
    new = [prompt_row(), NewRow(1, (10, 11, 13))]
    work = [
        WorkRow(0, 0, [*PROMPT[:-1], NAN_TOKEN], drafts=[3, 4]),
        WorkRow(1, 0, OTHER, drafts=served.truth(OTHER)),
    ]
    result = await session.execute(served.sender.batch(1, new=new, work=work))
    statuses = [pb.ROW_STATUS_INVALID_LOGITS, pb.ROW_STATUS_OK]
    assert list(result.row_statuses) == statuses
    assert runs_of(result) == [[], served.truth(OTHER, 2)]


LONG = [(7 * i + 3) % 150 for i in range(18)]


async def test_drafts_are_right_when_their_window_ends_in_other_blocks(
    served_window_several: Served,
) -> None:
    """Each looks back from where it is; what is behind the window of the input is gone."""
    session, served = served_window_several.open(), served_window_several
    truth, blocks = served.truth(LONG, 9), (3, 9, 1, 12, 7, 20, 5)
    first = served.sender.batch(1, new=[NewRow(0, blocks)], work=[WorkRow(0, 0, LONG)])
    assert await session.tokens(first) == truth[:1]
    writes = [(0, 0, (-1,) * ((len(LONG) - SLIDING_WINDOW + 1) // BLOCK_SIZE))]
    work = [WorkRow(0, len(LONG), back=1, drafts=some_right(truth[1:], 5, 6), run_on=1)]
    result = await session.execute(served.sender.batch(2, base=1, writes=writes, work=work))
    assert runs_of(result) == [truth[1:8]]
    work = [WorkRow(0, len(LONG) + 8, back=1)]
    assert await session.tokens(served.sender.batch(3, base=2, work=work)) == truth[8:]


async def test_drafts_read_what_is_encoded_when_their_row_brings_it(served_all: Served) -> None:
    session, served = served_all.open(), served_all
    encoder = [31, 41, 59, 26, 53, 58]
    truth = served.truth(PROMPT, 5, encoder=encoder)
    row = NewRow(0, BLOCKS, NUM_PROMPT, cross_blocks=(22, 23), encoder=encoder)
    work = [WorkRow(0, 0, PROMPT, drafts=truth[:3])]
    result = await session.execute(served.sender.batch(1, new=[row], work=work))
    assert runs_of(result) == [truth[:4]]
    work = [WorkRow(0, NUM_PROMPT + 3, back=1)]
    assert await session.tokens(served.sender.batch(2, base=1, work=work)) == truth[4:]


async def test_drafts_are_of_the_adapter_when_their_row_has_one(served_all: Served) -> None:
    session, served = served_all.open(), served_all
    truth = served.truth(PROMPT, 4, adapter="green")
    row = NewRow(0, BLOCKS, NUM_PROMPT, adapter="green")
    work = [WorkRow(0, 0, PROMPT, drafts=truth[:3])]
    result = await session.execute(served.sender.batch(1, new=[row], work=work))
    assert runs_of(result) == [truth]
