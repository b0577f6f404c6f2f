"""Messages of clients and to them."""

from __future__ import annotations

import math

import pytest

from scheduler_service.core.grammar import Grammar
from scheduler_service.streams.client_codec import decode_sampling_params, encode_default_sampling
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError
from tests.support.fakes.fake_scheduler import RECOMMENDED


def test_recommendation_is_passed_on_when_clients_may_ask_for_it() -> None:
    said = executor.SamplingParams(**RECOMMENDED, presence_penalty=1, num_logprobs=3)
    assert encode_default_sampling(said, 100) == api.SamplingParams(**RECOMMENDED)
    assert encode_default_sampling(executor.SamplingParams(), 100) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": math.inf},
        {"min_p": 1.5},
        {"repetition_penalty": -math.inf},
    ],
)
def test_recommendation_costs_only_itself_when_it_is_out_of_range(wrong: dict[str, float]) -> None:
    said = executor.SamplingParams(**{**RECOMMENDED, **wrong})
    left = {name: value for name, value in RECOMMENDED.items() if name not in wrong}
    assert encode_default_sampling(said, 100) == api.SamplingParams(**left)


@pytest.mark.parametrize(
    ("message", "grammar"),
    [
        (api.Grammar(json_schema="{}"), Grammar("json_schema", ("{}",))),
        (api.Grammar(regex=""), Grammar("regex", ("",))),
        (api.Grammar(lark="start: /x/"), Grammar("lark", ("start: /x/",))),
        (api.Grammar(choices=api.Choices(texts=["a", "b"])), Grammar("choices", ("a", "b"))),
    ],
)
def test_grammar_has_its_kind_and_texts_when_it_is_decoded(
    message: api.Grammar, grammar: Grammar
) -> None:
    assert decode_sampling_params(api.SamplingParams(grammar=message)).grammar == grammar


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (api.Grammar(), "grammar has no kind"),
        (api.Grammar(choices=api.Choices()), "has 0 texts; allowed: 1 to 1024"),
        (api.Grammar(choices=api.Choices(texts=["a"] * 1025)), "has 1025 texts"),
    ],
)
def test_grammar_is_refused_when_there_is_nothing_or_too_much_to_decode(
    message: api.Grammar, named: str
) -> None:
    with pytest.raises(DomainError, match=named) as caught:
        decode_sampling_params(api.SamplingParams(grammar=message))
    assert caught.value.reason == "SAMPLING_PARAMS_INVALID"
