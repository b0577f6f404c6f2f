"""Rows that get several tokens in one step, by run-on and by drafts: the same tokens, sooner."""

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
    Session,
)
from tests.support.steps.batches import NewRow, WorkRow, read_f32, read_i32, runs_of

OTHER = [80, 3, 3, 51, 29]
NUM_PROMPT = len(PROMPT)
BLOCKS = (3, 9, 1, 12, 7, 20)
# None of the tokens that make something go wrong.
HARMLESS = dict.fromkeys(range(OUT_OF_MEMORY_TOKEN, VOCAB_SIZE), -1000.0)


def prompt_row(**params: Any) -> NewRow:  # noqa: ANN401
    """Row 0, of PROMPT."""
    needs_history = {"repetition_penalty", "frequency_penalty"} & params.keys()
    history = PROMPT if needs_history else ()
    return NewRow(0, BLOCKS, NUM_PROMPT, params, seed=5, history=history)


async def one_by_one(session: Session, served: Served, num_tokens: int, **params: Any) -> list[int]:  # noqa: ANN401
    """The tokens of row 0 in as many steps, the first of which is 1."""
    batch = served.sender.batch
    work = [WorkRow(0, 0, PROMPT)]
    tokens = await session.tokens(batch(1, new=[prompt_row(**params)], work=work))
    for step_id in range(2, num_tokens + 1):
        work = [WorkRow(0, NUM_PROMPT + step_id - 2, back=1)]
        tokens += await session.tokens(batch(step_id, base=step_id - 1, work=work))
    return tokens


# -- run-on ----------------------------------------------------------------------------------------


async def test_row_gets_the_tokens_that_follow_when_it_runs_on(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    truth = served.truth(PROMPT, 9)
    first = served.sender.batch(1, new=[prompt_row()], work=[WorkRow(0, 0, PROMPT, run_on=2)])
    assert runs_of(await session.execute(first)) == [truth[:3]]
    work = [WorkRow(0, NUM_PROMPT + 2, back=1, run_on=4)]
    second = served.sender.batch(2, base=1, work=work)
    assert runs_of(await session.execute(second)) == [truth[3:8]]
    work = [WorkRow(0, NUM_PROMPT + 7, back=1)]
    assert await session.tokens(served.sender.batch(3, base=2, work=work)) == truth[8:]


async def test_rows_run_on_by_their_own_limits_in_one_step(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    new = [prompt_row(), NewRow(1, (10, 11, 13)), NewRow(2, (14, 15))]
    work = [
        WorkRow(1, 0, OTHER, run_on=3),
        WorkRow(2, 0, PROMPT, samples=False),
        WorkRow(0, 0, PROMPT, run_on=1),
    ]
    result = await session.execute(served.sender.batch(1, new=new, work=work))
    assert runs_of(result) == [served.truth(OTHER, 4), [], served.truth(PROMPT, 2)]
    work = [WorkRow(2, NUM_PROMPT - 1, PROMPT[-1:], run_on=1), WorkRow(1, len(OTHER) + 3, back=1)]
    result = await session.execute(served.sender.batch(2, base=1, work=work))
    assert runs_of(result) == [served.truth(PROMPT, 2), served.truth(OTHER, 5)[4:]]


async def test_steps_follow_each_other_when_they_are_sent_ahead(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    new = [prompt_row()]
    await session.send(served.sender.batch(1, new=new, work=[WorkRow(0, 0, PROMPT, run_on=2)]))
    work = [WorkRow(0, NUM_PROMPT + 2, back=1, run_on=3)]
    await session.send(served.sender.batch(2, base=1, work=work))
    work = [WorkRow(0, NUM_PROMPT + 6, back=1)]
    await session.send(served.sender.batch(3, base=2, work=work))
    runs = [runs_of(await session.receive())[0] for _ in range(3)]
    truth = served.truth(PROMPT, 8)
    assert runs == [truth[:3], truth[3:7], truth[7:]]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.5, "top_p": 0.9, "logit_bias": HARMLESS},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.75},
        {"min_tokens": 4, "suppressed_token_ids": list(range(0, VOCAB_SIZE, 2))},
        {"logit_bias": {9: 4.0, 33: 4.0, **HARMLESS}, "temperature": 2.0},
    ],
)
async def test_tokens_are_the_same_when_they_come_in_one_step(
    served_several: Served, params: dict[str, Any]
) -> None:
    session, served = served_several.open(), served_several
    expected = await one_by_one(session, served, 7, **params)
    batch = served.sender.batch(
        8, new=[prompt_row(**params)], work=[WorkRow(0, 0, PROMPT, run_on=6)]
    )
    assert runs_of(await session.execute(batch)) == [expected]


async def test_each_token_has_its_scores_when_a_row_runs_on(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    new = [prompt_row(num_logprobs=2), NewRow(1, (10, 11), params={"num_logprobs": 1})]
    work = [WorkRow(0, 0, PROMPT, run_on=2), WorkRow(1, 0, OTHER, run_on=1)]
    result = await session.execute(served.sender.batch(1, new=new, work=work))
    tokens, scores = runs_of(result), result.logprobs
    assert read_i32(scores.row_indexes) == [0, 0, 0, 1, 1]
    assert read_i32(scores.positions) == [6, 7, 8, 5, 6]
    assert read_i32(scores.token_ids) == [*tokens[0], *tokens[1]]
    assert read_i32(scores.top_offsets) == [0, 2, 4, 6, 7, 8]
    for step_id, position in enumerate(range(NUM_PROMPT, NUM_PROMPT + 3), 2):
        known = [*PROMPT, *tokens[0]][:position]
        new = [prompt_row(num_logprobs=2)]
        alone = served.sender.batch(step_id, new=new, work=[WorkRow(0, 0, known)])
        expected = (await session.execute(alone)).logprobs
        index = position - NUM_PROMPT
        for name in ("logprobs", "top_logprobs"):
            width = 1 if name == "logprobs" else 2
            found = read_f32(getattr(scores, name))[width * index : width * (index + 1)]
            assert found == pytest.approx(read_f32(getattr(expected, name)), abs=1e-4)


async def test_run_ends_with_a_token_that_ends_the_sequence(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    truth = served.truth(PROMPT, 6)
    end = next(i for i in range(1, 6) if truth[i] not in truth[:i])
    new = [prompt_row(stop_token_ids=[truth[end]]), NewRow(1, (10, 11, 13))]
    work = [WorkRow(0, 0, PROMPT, run_on=9), WorkRow(1, 0, OTHER)]
    await session.send(served.sender.batch(1, new=new, work=work))
    # Sent before it is known where row 0 is, and that it has ended.
    work = [WorkRow(0, NUM_PROMPT + 9, back=1, run_on=2), WorkRow(1, len(OTHER), back=1)]
    await session.send(served.sender.batch(2, base=1, work=work))
    assert runs_of(await session.receive()) == [truth[: end + 1], served.truth(OTHER)]
    result = await session.receive()
    statuses = [pb.ROW_STATUS_INPUT_UNAVAILABLE, pb.ROW_STATUS_OK]
    assert list(result.row_statuses) == statuses
    assert runs_of(result) == [[], served.truth(OTHER, 2)[1:]]


async def test_runs_end_before_a_turn_that_fails(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    new = [prompt_row(allowed_token_ids=[OUT_OF_MEMORY_TOKEN]), NewRow(1, (10, 11, 13))]
    work = [WorkRow(0, 0, PROMPT, run_on=5), WorkRow(1, 0, OTHER, run_on=2)]
    result = await session.execute(served.sender.batch(1, new=new, work=work))
    assert runs_of(result) == [[OUT_OF_MEMORY_TOKEN], served.truth(OTHER)]
    work = [WorkRow(0, NUM_PROMPT + 5, back=1), WorkRow(1, len(OTHER) + 2, back=1)]
    result = await session.execute(served.sender.batch(2, base=1, work=work))
    assert result.status == pb.STEP_STATUS_FAILED
    assert result.error.reason == pb.STEP_ERROR_REASON_OUT_OF_MEMORY


async def test_run_ends_before_a_token_that_cannot_be_sampled(served_several: Served) -> None:
    """The next step says why."""
    session, served = served_several.open(), served_several
    new = [
        prompt_row(allowed_token_ids=[NAN_TOKEN]),
        NewRow(1, (10, 11, 13)),
    ]
    work = [WorkRow(0, 0, PROMPT, run_on=5), WorkRow(1, 0, OTHER, run_on=2)]
    result = await session.execute(served.sender.batch(1, new=new, work=work))
    assert result.row_statuses == b""
    assert runs_of(result) == [[NAN_TOKEN], served.truth(OTHER, 3)]
    work = [WorkRow(0, NUM_PROMPT + 5, back=1), WorkRow(1, len(OTHER) + 2, back=1)]
    result = await session.execute(served.sender.batch(2, base=1, work=work))
    statuses = [pb.ROW_STATUS_INVALID_LOGITS, pb.ROW_STATUS_OK]
    assert list(result.row_statuses) == statuses
    assert runs_of(result) == [[], served.truth(OTHER, 4)[3:]]


# -- drafts ----------------------------------------------------------------------------------------


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
async def test_drafts_are_accepted_as_long_as_they_are_right(
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


@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 1.5, "repetition_penalty": 1.75}])
async def test_drafts_are_verified_when_steps_are_late(
    served_late_several: Served, params: dict[str, Any]
) -> None:
    session, served = served_late_several.open(), served_late_several
    expected = await one_by_one(session, served, 9, **params)
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, OTHER)]
    new = [prompt_row(**params), NewRow(1, (10, 11, 13))]
    await session.send(served.sender.batch(10, new=new, work=work))
    drafts = some_right(expected[1:], 2, 4)
    work = [WorkRow(0, NUM_PROMPT, back=1, drafts=drafts), WorkRow(1, len(OTHER), back=1)]
    await session.send(served.sender.batch(11, base=10, work=work))
    # The most that its position can be.
    await session.send(served.sender.batch(12, base=11, work=[WorkRow(0, NUM_PROMPT + 5, back=1)]))
    other = served.truth(OTHER, 2)
    assert runs_of(await session.receive()) == [expected[:1], other[:1]]
    assert runs_of(await session.receive()) == [expected[1:4], other[1:]]
    assert runs_of(await session.receive()) == [expected[4:5]]


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


async def test_row_has_its_status_when_nothing_can_be_sampled(
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
