from __future__ import annotations

import grpc
import pytest

from splitserve_client import (
    AsyncClient,
    DeadlineUnreachable,
    InvalidRequest,
    RequestFailed,
    SamplingParams,
    SchedulingParams,
    SplitserveError,
)
from splitserve_client.errors import error_of_failure, error_of_reason
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.errors import RpcFailure
from tests.support.fakes.fake_scheduler import Failed, FakeScheduler
from tests.unit.client.conftest import VirtualTime
from tests.unit.client.test_client import PROMPT, collect, cut_at

SCHEDULING = SchedulingParams(
    priority=-5,
    tenant="someone",
    deadline_s=2.25,
    adapter="poet",
    cache_salt="salt",
    bypass_prefix_cache=True,
    num_public_prefix_tokens=3,
)


async def submit(client: AsyncClient, way: str, scheduling: SchedulingParams | None) -> None:
    params = SamplingParams(max_tokens=2)
    if way == "generate":
        events = client.generate(
            PROMPT, params, scheduling=scheduling, encoder_token_ids=[8, 9] if scheduling else ()
        )
        await collect(events)
        return
    async with client.session() as session:
        stream = session.submit(
            PROMPT, params, scheduling=scheduling, encoder_token_ids=[8, 9] if scheduling else ()
        )
        await collect(stream)


@pytest.mark.parametrize("way", ["generate", "session"])
async def test_client_sends_every_scheduling_parameter_when_given(
    client: AsyncClient, fake: FakeScheduler, way: str
) -> None:
    await submit(client, way, SCHEDULING)

    (sent,) = fake.requests
    assert (sent.priority, sent.tenant, sent.adapter) == (-5, "someone", "poet")
    assert sent.deadline.ToTimedelta().total_seconds() == 2.25
    assert (sent.cache_salt, sent.bypass_prefix_cache) == ("salt", True)
    assert sent.num_public_prefix_tokens == 3
    assert list(sent.encoder_token_ids) == [8, 9]


@pytest.mark.parametrize("way", ["generate", "session"])
async def test_client_sends_no_scheduling_parameter_when_none_is_given(
    client: AsyncClient, fake: FakeScheduler, way: str
) -> None:
    await submit(client, way, None)

    assert [field.name for field, _ in fake.requests[0].ListFields()] == [
        "request_id",
        "prompt_token_ids",
        "sampling_params",
    ]


async def test_client_sends_the_rest_of_the_deadline_when_the_stream_breaks(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    fake.before_token = cut_at(1)  # type: ignore[assignment]

    await submit(client, "generate", SCHEDULING)

    first, second = (sent.deadline.ToTimedelta().total_seconds() for sent in fake.requests)
    assert first - second == pytest.approx(sum(virtual_time.pauses_s))
    assert fake.requests[1].adapter == "poet"


@pytest.mark.parametrize("way", ["generate", "session"])
@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("DEADLINE_UNREACHABLE", DeadlineUnreachable),
        ("KV_CACHE_EXHAUSTED", RequestFailed),
        ("ROW_FAILED", RequestFailed),
    ],
)
async def test_client_raises_by_reason_when_an_accepted_request_fails(
    client: AsyncClient,
    fake: FakeScheduler,
    way: str,
    reason: str,
    kind: type[SplitserveError],
) -> None:
    def before_token(number: int) -> None:
        raise Failed(reason)

    fake.before_token = before_token

    with pytest.raises(RequestFailed) as caught:
        await submit(client, way, SCHEDULING)

    assert (type(caught.value), caught.value.reason) == (kind, reason)
    assert len(fake.requests) == 1


async def test_session_refuses_when_scheduling_parameters_are_out_of_range(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def before_request(request: object) -> None:
        raise DomainError("SCHEDULING_PARAMS_INVALID", "priority is 101; allowed: [-100, 100]")

    fake.before_request = before_request

    with pytest.raises(InvalidRequest, match="priority is 101") as caught:
        await submit(client, "session", SchedulingParams(priority=101))

    assert caught.value.reason == "SCHEDULING_PARAMS_INVALID"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("SCHEDULING_PARAMS_INVALID", InvalidRequest),
        ("FEATURE_UNSUPPORTED", InvalidRequest),
        ("DEADLINE_UNREACHABLE", DeadlineUnreachable),
        ("KV_CACHE_EXHAUSTED", RequestFailed),
    ],
)
def test_error_of_reason_is_of_its_kind_when_it_comes_in_band(
    reason: str, kind: type[SplitserveError]
) -> None:
    assert type(error_of_reason(reason, "no")) is kind


def test_error_of_failure_is_invalid_request_when_a_call_has_bad_scheduling_parameters() -> None:
    failure = RpcFailure(grpc.StatusCode.INVALID_ARGUMENT, "SCHEDULING_PARAMS_INVALID", "no", None)

    error = error_of_failure(failure)

    assert (type(error), error.reason) == (InvalidRequest, "SCHEDULING_PARAMS_INVALID")
