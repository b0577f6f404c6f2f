"""Sampling and scheduling parameters from fields of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from splitserve_client import (
    BeamSearch,
    EarlyStopping,
    Model,
    SamplingParams,
    SchedulingParams,
)
from splitserve_gateway.generation import sampling_params, scheduling_params
from splitserve_gateway.http import ApiError
from splitserve_gateway.schemas import CompletionRequest
from splitserve_gateway.upstreams import ServedByScheduler

RECOMMENDED = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)
SERVED = ServedByScheduler(Model("m", "d", "float32", 100, 64, (1,), RECOMMENDED), None)


def params_of(**fields: Any) -> SamplingParams:  # noqa: ANN401
    return sampling_params(CompletionRequest(**fields), SERVED, max_tokens=5)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"top_k": -1, "top_p": 0.5, "min_p": 0.1}, {"top_k": -1, "top_p": 0.5, "min_p": 0.1}),
        ({"presence_penalty": 1}, {"presence_penalty": 1}),
        ({"logit_bias": {5: -1.5}}, {"logit_bias": {5: -1.5}}),
        ({"seed": -7, "n": 2, "best_of": 3}, {"seed": -7, "n": 2, "best_of": 3}),
        ({"stop_token_ids": [3], "ignore_eos": True}, {"stop_token_ids": (3,), "ignore_eos": True}),
        ({"min_tokens": 2, "allowed_token_ids": [4]}, {"min_tokens": 2, "allowed_token_ids": (4,)}),
    ],
)
def test_params_are_the_fields_and_else_what_the_model_recommends(
    fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert params_of(**fields) == replace(RECOMMENDED, max_tokens=5, **changes)


def test_beam_search_is_as_wide_as_n_and_without_recommendations() -> None:
    params = params_of(use_beam_search=True, n=3, length_penalty=0.5, early_stopping=True)
    beams = BeamSearch(3, 0.5, EarlyStopping.ALWAYS)
    assert params == SamplingParams(n=3, max_tokens=5, beam_search=beams)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ],
)
def test_field_is_refused_when_it_means_nothing(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        params_of(**fields)
    assert raised.value.param == param


def test_scheduling_is_what_the_fields_say() -> None:
    body = CompletionRequest(
        user="u",
        priority=-3,
        cache_salt="s",
        deadline_s=2.5,
        num_public_prefix_tokens=9,
        target_itl_ms=40,
    )
    expected = SchedulingParams(
        priority=-3,
        tenant="u",
        deadline_s=2.5,
        cache_salt="s",
        num_public_prefix_tokens=9,
        target_itl_ms=40,
    )
    assert scheduling_params(body) == expected
    assert scheduling_params(CompletionRequest()) == SchedulingParams()
