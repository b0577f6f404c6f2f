"""Rows that get several tokens in one step: the same tokens, in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import (
    NAN_TOKEN,
    OUT_OF_MEMORY_TOKEN,
    PROMPT,
    VOCAB_SIZE,
    Served,
)
from tests.contract.several import HARMLESS, NUM_PROMPT, OTHER, one_by_one, prompt_row
from tests.support.steps.batches import NewRow, WorkRow, read_f32, read_i32, runs_of


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


async def test_rows_run_as_far_as_each_may_when_they_share_a_step(served_several: Served) -> None:
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
