"""Session: many requests over one stream."""

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from splitserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.stranger.client import Completion, Param, Session, read_error, request_of
from tests.contract.stranger.executor import StrangerExecutor
from tests.contract.stranger.process import Driver, running_cluster
from tests.contract.stranger.truth import expected_scores, expected_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Driver]:
    async with running_cluster(StrangerExecutor()) as running:
        yield running


def prompt_of(handle: int) -> list[int]:
    return [(handle + i) % 1000 for i in range(6)]


async def submit(session: Session, handle: int, max_tokens: int = 6, **params: Param) -> list[int]:
    """Submits a seeded request; returns its true tokens."""
    prompt = prompt_of(handle)
    request = request_of(prompt, seed=handle, temperature=1, max_tokens=max_tokens, **params)
    await session.submit(handle, request)
    return expected_tokens(prompt, handle, 1, max_tokens)


async def test_session_ends_when_all_have_finished_after_half_close(cluster: Driver) -> None:
    session = cluster.client.session()
    handles = (3, -7, 2**31 - 1, 0)
    truth = {handle: await submit(session, handle) for handle in handles}
    await session.half_close()
    await session.read_all()
    assert {h: c.tokens for h, c in session.completions.items()} == truth
    assert {c.reason for c in session.completions.values()} == {"LENGTH"}
    await cluster.wait_idle()
    cluster.check_contract()


async def test_one_message_submits_several_requests(cluster: Driver) -> None:
    session = cluster.client.session()
    truth = {1: await submit(session, 1)}
    await session.read_until_ended(1)
    assert any(message.takes_submissions for message in session.messages)
    message = pb.SessionRequest()
    for handle in range(2, 30):
        truth[handle] = expected_tokens(prompt_of(handle), handle, 1, 6)
        request = request_of(prompt_of(handle), seed=handle, temperature=1, max_tokens=6)
        message.submissions.add(handle=handle, request=request)
        session.completions[handle] = Completion()
    session.completions |= {30: Completion(), 31: Completion()}
    message.submissions.add(handle=30, request=request_of([], max_tokens=1))
    message.submit.CopyFrom(pb.SessionSubmit(handle=31, request=request_of([], max_tokens=1)))

    await session.send(message)
    await session.half_close()
    await session.read_all()

    assert {h: c.tokens for h, c in session.completions.items() if c.tokens} == truth
    assert {h: r.reason for h, r in session.rejected.items()} == dict.fromkeys(
        (30, 31), "PROMPT_EMPTY"
    )
    await cluster.wait_idle()
    cluster.check_contract()


async def test_session_sends_one_message_a_step_when_requests_run_together(
    cluster: Driver,
) -> None:
    (executor,) = cluster.executors
    executor.gate.clear()
    session = cluster.client.session()
    for handle in range(4):
        await submit(session, handle, max_tokens=10)
    await cluster.wait_for_states(
        lambda s: s[0].num_running_requests + s[0].num_waiting_requests == 4
    )
    executor.gate.set()
    await session.half_close()
    await session.read_all()
    sizes = [len(message.handles) for message in session.messages]
    assert all(len(set(m.handles)) == len(m.handles) for m in session.messages)
    assert 4 in sizes


async def test_session_aborts_one_when_handle_is_aborted(cluster: Driver) -> None:
    session = cluster.client.session()
    await submit(session, 1, max_tokens=190)
    truth = await submit(session, 2)
    await session.read_until_token(1)
    await session.abort(77)
    await session.abort(1)
    await session.half_close()
    await session.read_all()
    assert session.completions[1].reason == "ABORTED"
    assert (session.completions[2].tokens, session.completions[2].reason) == (truth, "LENGTH")
    await cluster.wait_idle()


async def test_abort_ends_a_request_when_it_is_called_by_id(cluster: Driver) -> None:
    session = cluster.client.session()
    await session.submit(5, request_of([1, 2], "by-id", max_tokens=190))
    await session.read_until_token(5)
    await cluster.client.abort("by-id")
    await session.read_until_ended(5)
    await session.half_close()
    await session.read_all()
    assert session.completions[5].reason == "ABORTED"

    generation = cluster.client.start(request_of([1, 2], "alone", max_tokens=190, temperature=0))
    await generation.read_until(2)
    await cluster.client.abort("alone")
    completion = await generation.finish()
    assert completion.reason == "ABORTED"
    assert completion.finish is not None
    assert completion.finish.usage.num_output_tokens == len(completion.tokens)
    assert completion.tokens == expected_tokens([1, 2], 0, 0, len(completion.tokens))
    await cluster.wait_idle()


async def test_session_reuses_handle_when_its_request_has_ended(cluster: Driver) -> None:
    session = cluster.client.session()
    other = await submit(session, 1)
    for max_tokens in (1, 2, 3):
        truth = await submit(session, 9, max_tokens=max_tokens)
        await session.read_until_ended(9)
        assert session.completions[9].tokens == truth
    await session.submit(9, request_of([]))
    await session.read_until_ended(9)
    assert session.rejected.pop(9).reason == "PROMPT_EMPTY"
    truth = await submit(session, 9)
    await session.half_close()
    await session.read_all()
    assert session.completions[9].tokens == truth
    assert session.completions[1].tokens == other


async def test_session_sends_logprobs_as_events_when_asked(cluster: Driver) -> None:
    session = cluster.client.session()
    truth = await submit(session, 4, num_logprobs=1)
    await session.half_close()
    await session.read_all()
    completion = session.completions[4]
    scores = expected_scores(prompt_of(4) + truth, 6, 1)
    assert completion.tokens == truth
    assert [one.logprob for one in completion.logprobs] == [score.logprob for score in scores]
    assert all(not message.handles for message in session.messages)


@pytest.mark.parametrize("message", ["reused handle", "no action"])
async def test_session_ends_with_error_when_protocol_is_broken(
    cluster: Driver, message: str
) -> None:
    session = cluster.client.session()
    await submit(session, 1, max_tokens=190)
    await session.read_until_token(1)
    if message == "no action":
        await session.send(pb.SessionRequest())
    else:
        await submit(session, 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await session.read_all()
    error = read_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.reason, error.domain) == ("SESSION_PROTOCOL", "splitserve")
    await cluster.wait_idle()


async def test_blocks_are_free_when_streams_break_or_bring_nothing(cluster: Driver) -> None:
    empty, session = cluster.client.session(), cluster.client.session()
    await empty.half_close()
    await empty.read_all()
    assert empty.messages == []
    await submit(session, 1, max_tokens=190)
    await session.read_until_token(1)
    session.cancel()
    generation = cluster.client.start(request_of([1] * 50, max_tokens=140))
    await generation.read_until(1)
    generation.cancel()
    await cluster.wait_idle()


async def test_generate_frees_blocks_when_deadline_passes(cluster: Driver) -> None:
    (executor,) = cluster.executors
    # However late its steps are, it does not end before.
    executor.gate.clear()
    generation = cluster.client.start(request_of([1] * 50, max_tokens=140), timeout_s=3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generation.finish()
    executor.gate.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.wait_idle()
    cluster.check_contract()
