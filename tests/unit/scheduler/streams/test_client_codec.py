"""Tests decoding requests of clients, and what is encoded for them."""

from __future__ import annotations

import math

import pytest

from scheduler_service.scheduler.values import Grammar
from scheduler_service.streams import (
    SamplingDecoder,
    decode_sampling_params,
    encode_default_sampling,
)
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError
from tests.support.fakes.fake_scheduler import RECOMMENDED


def test_recommendation_is_passed_on_when_clients_may_ask_for_it() -> None:
    said = executor.SamplingParams(**RECOMMENDED, presence_penalty=1, num_logprobs=3)
    assert encode_default_sampling(said) == api.SamplingParams(**RECOMMENDED)
    assert encode_default_sampling(executor.SamplingParams()) is None


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
    assert encode_default_sampling(said) == api.SamplingParams(**left)


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
def test_grammar_is_refused_when_its_size_is_wrong(message: api.Grammar, named: str) -> None:
    with pytest.raises(DomainError, match=named) as caught:
        decode_sampling_params(api.SamplingParams(grammar=message))
    assert caught.value.reason == "SAMPLING_PARAMS_INVALID"


@pytest.mark.parametrize(
    "message",
    [
        api.SamplingParams(),
        api.SamplingParams(temperature=0.5, top_k=-1, stop_token_ids=[3, 4]),
        api.SamplingParams(temperature=0.5, seed=7),
        api.SamplingParams(allowed_token_ids=range(500)),
    ],
)
def test_decoder_gives_the_same_for_repeated_messages(
    message: api.SamplingParams,
) -> None:
    decoder = SamplingDecoder()
    for _ in range(2):
        assert decoder.decode(message) == decode_sampling_params(message)


def test_decoder_keeps_a_bounded_number_of_messages_when_all_differ() -> None:
    decoder = SamplingDecoder()
    first = decoder.decode(api.SamplingParams(max_tokens=1))
    assert decoder.decode(api.SamplingParams(max_tokens=1)) is first
    for max_tokens in range(1000):
        assert decoder.decode(api.SamplingParams(max_tokens=max_tokens)).max_tokens == max_tokens
    assert decoder.decode(api.SamplingParams(max_tokens=1)) is not first


def test_decoder_refuses_what_is_wrong_when_it_comes_again() -> None:
    decoder = SamplingDecoder()
    for _ in range(2):
        with pytest.raises(DomainError, match="grammar has no kind"):
            decoder.decode(api.SamplingParams(grammar=api.Grammar()))
