from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from executor_service.steps.batch import BatchRefused, StepErrorReason
from executor_service.steps.executor_info import SAMPLING_FEATURES, Feature
from executor_service.steps.new_row_checks import check_sampling_params
from executor_service.steps.sampling_params import ParamRows, SamplingParams, TokenConstraints
from tests.contract.served import make_fake_backend, make_info


def blocked(params: SamplingParams, vocab_size: int) -> list[int]:
    assert params.constraints is not None
    mask = params.constraints.blocked(vocab_size)
    assert mask is not None
    return [token_id for token_id in range(vocab_size) if mask[token_id]]


def test_blocked_is_all_else_when_some_tokens_are_allowed() -> None:
    params = SamplingParams(allowed_token_ids=(5, 1, 5), bad_words_token_ids=((5,), (1, 2)))
    assert blocked(params, 7) == [0, 2, 3, 4, 5, 6]
    assert blocked(SamplingParams(bad_words_token_ids=((5,), (1, 2))), 7) == [5]


def test_nothing_is_blocked_when_there_are_only_phrases() -> None:
    constraints = TokenConstraints.of((), ((1, 2),))
    assert constraints is not None
    assert constraints.blocked(7) is None


@pytest.mark.parametrize(
    ("history", "num_tokens", "forbidden"),
    [
        ([1], 1, [2]),
        ([3, 1], 2, [2, 4]),
        ([9, 3, 1], 3, [2, 4, 6]),
        # What is known beyond the position is not before it.
        ([9, 3, 1], 2, []),
        ([9, 3, 1, 1], 4, [2]),
        ([3], 1, []),
        ([], 0, []),
    ],
)
def test_phrases_forbid_their_last_token_when_the_rest_has_come(
    history: list[int], num_tokens: int, forbidden: list[int]
) -> None:
    constraints = TokenConstraints.of((), ((1, 2), (3, 1, 4), (9, 3, 1, 6), (8,)))
    assert constraints is not None
    assert constraints.forbidden_after(history, num_tokens) == forbidden


@pytest.mark.parametrize(
    ("fields", "is_adjusting", "needs_history"),
    [
        ({}, False, False),
        ({"allowed_token_ids": (1,)}, True, False),
        ({"bad_words_token_ids": ((1,),)}, True, False),
        ({"bad_words_token_ids": ((1,), (1, 2))}, True, True),
    ],
)
def test_history_is_kept_when_phrases_need_it(
    fields: Mapping[str, Any], is_adjusting: bool, needs_history: bool
) -> None:
    params = SamplingParams(**fields)
    assert params.needs_history == needs_history
    assert ParamRows.of([params]).adjusts_logits.tolist() == [is_adjusting]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (1,)},
        {"bad_words_token_ids": ((1,),)},
        {"logit_bias": {1: -math.inf}},
    ],
)
def test_params_are_refused_by_name_when_the_feature_was_not_announced(
    fields: Mapping[str, Any],
) -> None:
    params = SamplingParams(**fields)
    check_sampling_params(params, make_info(make_fake_backend()), "p")
    older = make_fake_backend(SAMPLING_FEATURES - {Feature.TOKEN_CONSTRAINTS})
    with pytest.raises(BatchRefused, match="TOKEN_CONSTRAINTS") as refusal:
        check_sampling_params(params, make_info(older), "p")
    assert refusal.value.error.reason is StepErrorReason.FEATURE_UNSUPPORTED
    assert refusal.value.error.field == f"p.{next(iter(fields))}"
