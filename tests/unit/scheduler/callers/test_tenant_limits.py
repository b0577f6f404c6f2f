"""What refuses says which limit it was, for who reads the audit log."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.callers.caller import NO_LIMITS, TenantLimits
from scheduler_service.callers.tenants_file import (
    check_model,
    check_prompt,
    check_request,
    may_use_model,
)
from scheduler_service.scheduler.values.request import Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import BeamParams, SamplingParams
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError


def a_request(params: SamplingParams, scheduling: SchedulingParams) -> Request:
    return Request.create("r", [1], params, arrival=1, seed=1, scheduling=scheduling)


CASES: list[tuple[dict[str, Any], SamplingParams, SchedulingParams]] = [
    ({"max_output_tokens": 4}, SamplingParams(max_tokens=5), SchedulingParams()),
    ({"max_output_tokens": 4}, SamplingParams(min_tokens=5), SchedulingParams()),
    ({"max_sequences": 2}, SamplingParams(n=3), SchedulingParams()),
    ({"max_sequences": 2}, SamplingParams(best_of=3), SchedulingParams()),
    ({"max_sequences": 2}, SamplingParams(beam=BeamParams(3)), SchedulingParams()),
    ({"min_priority": 0}, SamplingParams(), SchedulingParams(priority=-1)),
    ({"max_priority": 0}, SamplingParams(), SchedulingParams(priority=1)),
    ({"adapters": ("a-*",)}, SamplingParams(), SchedulingParams(adapter="b-1")),
]


@pytest.mark.parametrize(("limits", "params", "scheduling"), CASES)
def test_refusal_names_its_limit(
    limits: dict[str, Any], params: SamplingParams, scheduling: SchedulingParams
) -> None:
    request = a_request(params, scheduling)
    with pytest.raises(DomainError) as caught:
        check_request(request, TenantLimits(**limits), "t")
    assert [caught.value.limit] == list(limits)
    assert "tenant 't'" in caught.value.message
    check_request(request, NO_LIMITS, "t")


def test_request_passes_when_it_is_at_every_limit() -> None:
    limits = TenantLimits(
        min_priority=-3,
        max_priority=-3,
        max_output_tokens=5,
        max_sequences=2,
        adapters=("x", "a-?"),
    )
    params = SamplingParams(max_tokens=5, min_tokens=5, n=2)
    check_request(a_request(params, SchedulingParams(priority=-3, adapter="a-1")), limits, "t")
    check_request(a_request(params, SchedulingParams(priority=-3)), limits, "t")


@pytest.mark.parametrize("name", ["prompt_token_ids", "encoder_token_ids"])
def test_prompt_is_refused_when_it_is_longer_than_the_tenants(name: str) -> None:
    limits, message = TenantLimits(max_prompt_tokens=3), api.GenerateRequest()
    getattr(message, name).extend([1, 2, 3])
    check_prompt(message, limits, "t")
    getattr(message, name).append(4)
    with pytest.raises(DomainError) as caught:
        check_prompt(message, limits, "t")
    assert (caught.value.reason, caught.value.limit) == ("PROMPT_TOO_LONG", "max_prompt_tokens")


def test_model_is_one_of_the_patterns() -> None:
    limits = TenantLimits(models=("qwen-*", "Llama"))
    assert [may_use_model(limits, name) for name in ("qwen-7b", "Llama", "llama", "x")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(DomainError) as caught:
        check_model(limits, "t", "x")
    assert (caught.value.reason, caught.value.limit) == ("CALLER_NOT_ALLOWED", "models")
    assert not may_use_model(TenantLimits(models=()), "x")
    check_model(NO_LIMITS, "t", "x")
