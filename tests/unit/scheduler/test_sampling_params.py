"""Validation of sampling parameters."""

from __future__ import annotations

import pytest

from scheduler_service.client_codec import decode_sampling_params
from scheduler_service.core.sampling_params import SamplingParams
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("num_logprobs", 21),
        ("num_prompt_logprobs", -1),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("stop_token_ids", frozenset({100})),
        ("stop_token_ids", frozenset(range(300))),
    ],
)
def test_validate_names_field_and_allowed_range_when_out_of_range(
    field: str, value: object
) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(DomainError, match=field) as refusal:
        params.validate(vocab_size=100)
    assert refusal.value.reason == "SAMPLING_PARAMS_INVALID"
    assert "allowed" in refusal.value.message


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_is_off_when_it_is_0_or_minus_1(top_k: int) -> None:
    message = api.SamplingParams(top_k=top_k)
    for params in (SamplingParams(top_k=top_k), decode_sampling_params(message)):
        params.validate(vocab_size=100)
        assert params == SamplingParams()


def test_validate_refuses_min_tokens_above_max_tokens() -> None:
    with pytest.raises(DomainError, match="min_tokens is 5"):
        SamplingParams(min_tokens=5, max_tokens=4).validate(vocab_size=100)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=1, top_p=1.0, min_p=1.0, num_logprobs=0),
        SamplingParams(presence_penalty=-2.0, logit_bias={0: -100.0, 99: 100.0}),
    ],
)
def test_validate_accepts_the_edges(params: SamplingParams) -> None:
    params.validate(vocab_size=100)
