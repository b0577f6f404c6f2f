"""Tests the bounds of kept output: time, tenants and bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.request_limits import RequestKey, RequestName
from scheduler_service.scheduler.values import Request, SamplingParams, SchedulingParams
from scheduler_service.streams import Keeping, KeptOutputs, decode_keeping, digest_of_message
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError

PROMPT = [3, 1, 4]
NS_PER_S = 10**9
# 4 MiB of a tenant, as the contract says.
MAX_TENANT_TOKENS = 2**20


class Clock:
    """Clock of a test."""

    def __init__(self) -> None:
        self.now_ns = 5 * NS_PER_S

    def __call__(self) -> int:
        return self.now_ns


def keeping(key: str, tenant: str = "", duration_s: int = 60) -> Keeping:
    return Keeping(RequestName(key, tenant or None).key, duration_s * NS_PER_S, False, ())


def end(
    kept: KeptOutputs, key: str, num_tokens: int, tenant: str = "", duration_s: int = 60
) -> None:
    """Lets a request with that many output tokens begin and end."""
    request = Request.create(
        f"request of {key}",
        PROMPT,
        SamplingParams(),
        arrival=1,
        seed=0,
        resume_token_ids=[[7] * num_tokens],
        scheduling=SchedulingParams(tenant=tenant),
    )
    kept.begin(request, keeping(key, tenant, duration_s))
    kept.end(request)


def num_kept(kept: KeptOutputs, key: str, tenant: str = "") -> int | None:
    """Number of tokens kept; None if the output is unknown."""
    prompt = digest_of_message(api.GenerateRequest(prompt_token_ids=PROMPT))
    try:
        (tokens,) = kept.find(keeping(key, tenant), tenant, prompt)
    except DomainError:
        return None
    return len(tokens)


def test_output_is_kept_for_its_time() -> None:
    clock = Clock()
    kept = KeptOutputs(clock)
    end(kept, "a", 5, duration_s=10)
    clock.now_ns += 10 * NS_PER_S - 1
    assert num_kept(kept, "a") == 5
    clock.now_ns += 1
    assert num_kept(kept, "a") is None


def test_tenants_do_not_see_each_other() -> None:
    kept = KeptOutputs(Clock())
    end(kept, "a", 5, "one")
    end(kept, "a", 6, "two")
    assert num_kept(kept, "a", "one") == 5
    assert num_kept(kept, "a", "two") == 6
    assert num_kept(kept, "a", "three") is None
    assert num_kept(kept, "a") is None


def test_oldest_output_of_the_tenant_goes_first() -> None:
    kept = KeptOutputs(Clock())
    end(kept, "small", 9, "other")
    for number in range(4):
        end(kept, f"{number}", MAX_TENANT_TOKENS // 3, "large")
    found = [num_kept(kept, f"{number}", "large") for number in range(4)]
    assert found == [None, None, MAX_TENANT_TOKENS // 3, MAX_TENANT_TOKENS // 3]
    assert num_kept(kept, "small", "other") == 9


def test_output_above_the_limit_is_not_kept() -> None:
    kept = KeptOutputs(Clock())
    end(kept, "a", 5)
    end(kept, "b", MAX_TENANT_TOKENS)
    assert num_kept(kept, "b") is None
    assert num_kept(kept, "a") == 5


def test_tenant_with_the_most_gives_way() -> None:
    kept = KeptOutputs(Clock())
    for number in range(15):
        end(kept, "a", MAX_TENANT_TOKENS * 9 // 10, f"tenant {number}")
    for number in range(12):
        end(kept, "many", MAX_TENANT_TOKENS // 4, f"small {number}")
    small = [num_kept(kept, "many", f"small {number}") for number in range(12)]
    assert small == [MAX_TENANT_TOKENS // 4] * 12
    large = [num_kept(kept, "a", f"tenant {number}") for number in range(15)]
    assert None in large


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["", "x"]), st.integers(0, 9), st.integers(1, 9)
        ),
        max_size=30,
    ),
    st.integers(1, 12),
)
def test_latest_request_of_a_key_counts(
    requests: list[tuple[str, str, int, int]], pause_s: int
) -> None:
    clock = Clock()
    kept = KeptOutputs(clock)
    latest: dict[tuple[str, str], tuple[int, int]] = {}
    for key, tenant, num_tokens, duration_s in requests:
        end(kept, key, num_tokens, tenant, duration_s)
        latest[key, tenant] = (num_tokens, clock.now_ns + duration_s * NS_PER_S)
        clock.now_ns += pause_s * NS_PER_S // 4
        for (known, owner), (expected, until_ns) in latest.items():
            found = num_kept(kept, known, owner)
            assert found == (expected if clock.now_ns < until_ns else None)


def test_only_the_latest_of_two_unfinished_requests_is_kept() -> None:
    kept = KeptOutputs(Clock())
    requests = [
        Request.create(f"r{n}", PROMPT, SamplingParams(), arrival=n, seed=0) for n in range(2)
    ]
    for request in requests:
        kept.begin(request, keeping("a"))
    assert kept.unfinished(RequestKey("a")) == "r1"
    kept.end(requests[0])
    assert num_kept(kept, "a") is None
    kept.end(requests[1])
    assert num_kept(kept, "a") == 0
    assert kept.unfinished(RequestKey("a")) is None


def test_own_tokens_and_kept_ones_exclude_each_other() -> None:
    message = api.GenerateRequest(
        prompt_token_ids=PROMPT,
        resume_token_ids=[1],
        kept_output=api.KeptOutput(key="a", resumes=True),
    )
    with pytest.raises(DomainError, match=r"kept_output\.resumes excludes resume_token_ids"):
        decode_keeping(message, RequestKey("a"))
