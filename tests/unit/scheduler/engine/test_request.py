"""Requests: sequences, seeds, resumed tokens, sampling parameters and their ranges."""

from __future__ import annotations

import math

import pytest

from scheduler_service.scheduler.values import (
    BeamParams,
    Request,
    SamplingParams,
    sequence_seed,
    token_array,
)
from scheduler_service.streams import decode_sampling_params
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError


def create(resume: list[list[int]] | None = None, **params: object) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request.create(
        "r", [1, 2, 3], sampling, arrival=1, seed=5, resume_token_ids=resume or ()
    )


@pytest.mark.parametrize(
    ("params", "num_sequences"),
    [({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 4}, 4), ({"beam": BeamParams(4), "n": 2}, 1)],
)
def test_create_makes_a_sequence_for_each_completion(
    params: dict[str, object], num_sequences: int
) -> None:
    request = create(**params)  # type: ignore[arg-type]
    assert [sequence.index for sequence in request.sequences] == list(range(num_sequences))


def test_create_gives_resumed_tokens_to_their_sequences() -> None:
    request = create(n=3, resume=[[7], [], [8, 9]])
    tokens = [sequence.token_ids.tolist() for sequence in request.sequences]
    assert tokens == [[1, 2, 3, 7], [1, 2, 3], [1, 2, 3, 8, 9]]
    assert [sequence.num_output_tokens for sequence in request.sequences] == [1, 0, 2]


@pytest.mark.parametrize(("resume", "num_sent"), [([], 0), ([[]], 0), ([[7]], 2)])
def test_create_takes_prompt_logprobs_as_sent_when_resumed(
    resume: list[list[int]], num_sent: int
) -> None:
    assert create(resume=resume).num_prompt_logprobs_sent == num_sent


def test_create_gives_each_sequence_its_own_seed() -> None:
    seeds = [sequence.seed for sequence in create(n=4).sequences]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_sequence_seed_stays_a_signed_64_bit_number(seed: int) -> None:
    assert sequence_seed(seed, 0) == seed
    assert all(-(2**63) <= sequence_seed(seed, index) < 2**63 for index in range(20))


def test_token_array_refuses_tokens_over_32_bits() -> None:
    with pytest.raises(ValueError, match="32-bit"):
        token_array([1, 2**31])


def test_row_params_ask_for_logprobs_when_the_best_are_chosen() -> None:
    request = create(temperature=0.5, n=1, best_of=2)
    assert request.row_params == SamplingParams(temperature=0.5, num_logprobs=0, n=1, best_of=2)


def test_row_params_ask_for_candidates_only_when_beams_are_searched() -> None:
    request = create(beam=BeamParams(2), min_tokens=4, max_tokens=9)
    request.num_candidates = 3
    expected = SamplingParams(temperature=0.0, num_logprobs=3, beam=BeamParams(2))
    assert request.row_params == expected


def test_row_params_name_all_stop_tokens_with_min_tokens() -> None:
    request = create(min_tokens=4, stop_token_ids=frozenset({7}))
    request.stop_token_ids = frozenset({2, 7})
    assert request.row_params.stop_token_ids == {2, 7}


def test_row_params_leave_out_bad_words_that_end_sequences() -> None:
    request = create(bad_words_token_ids=((2,), (5,), (2, 5)))
    request.stop_token_ids = frozenset({2})
    assert request.row_params.bad_words_token_ids == ((5,), (2, 5))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("stop_token_ids", frozenset({100})),
        ("stop_token_ids", frozenset(range(300))),
        ("logit_bias", {3: float("inf")}),
        ("logit_bias", {3: float("nan")}),
        ("allowed_token_ids", frozenset({5, 100})),
        ("allowed_token_ids", frozenset({-1})),
        ("allowed_token_ids", frozenset(range(16385))),
        ("bad_words_token_ids", ((1, 2), (3, 100))),
        ("bad_words_token_ids", ((-1,),)),
        ("bad_words_token_ids", ((1,), ())),
        ("bad_words_token_ids", ((1,),) * 1025),
        ("bad_words_token_ids", ((1,) * 4096, (2,) * 4097)),
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
def test_top_k_is_off_at_0_or_minus_1(top_k: int) -> None:
    message = api.SamplingParams(top_k=top_k)
    for params in (SamplingParams(top_k=top_k), decode_sampling_params(message)):
        params.validate(vocab_size=100)
        assert params == SamplingParams()


def test_validate_refuses_min_tokens_when_they_are_above_max_tokens() -> None:
    with pytest.raises(DomainError, match="min_tokens is 5"):
        SamplingParams(min_tokens=5, max_tokens=4).validate(vocab_size=100)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=1, top_p=1.0, min_p=1.0, num_logprobs=0),
        SamplingParams(presence_penalty=-2.0, logit_bias={0: -100.0, 99: 100.0}),
        SamplingParams(logit_bias={0: -math.inf}, allowed_token_ids=frozenset(range(100))),
        SamplingParams(bad_words_token_ids=((99,) * 8,) * 1024),
        SamplingParams(bad_words_token_ids=((0,) * 8192,)),
    ],
)
def test_validate_accepts_values_when_they_are_at_the_edges(params: SamplingParams) -> None:
    params.validate(vocab_size=100)


EOS = frozenset({2, 3})
ALL = range(100)


@pytest.mark.parametrize(
    ("params", "is_empty"),
    [
        (SamplingParams(allowed_token_ids=frozenset({7})), False),
        (SamplingParams(allowed_token_ids=frozenset({7}), logit_bias={7: -math.inf}), True),
        (SamplingParams(allowed_token_ids=frozenset({7}), logit_bias={7: -100.0}), False),
        (SamplingParams(allowed_token_ids=frozenset({7}), bad_words_token_ids=((7,),)), True),
        (SamplingParams(allowed_token_ids=frozenset({7}), bad_words_token_ids=((7, 7),)), False),
        (SamplingParams(logit_bias=dict.fromkeys(ALL, -math.inf)), True),
        (SamplingParams(logit_bias=dict.fromkeys(ALL[1:], -math.inf)), False),
        # The end is all there can be, but it may not come yet.
        (SamplingParams(allowed_token_ids=EOS), False),
        (SamplingParams(allowed_token_ids=EOS, min_tokens=1), True),
        (SamplingParams(allowed_token_ids=EOS, min_tokens=1, ignore_eos=True), False),
        (SamplingParams(min_tokens=1, stop_token_ids=frozenset(ALL)), True),
        # What ends the output is no bad word, as long as it ends it.
        (SamplingParams(allowed_token_ids=EOS, bad_words_token_ids=((2,), (3,))), False),
        (
            SamplingParams(
                allowed_token_ids=EOS, bad_words_token_ids=((2,), (3,)), ignore_eos=True
            ),
            True,
        ),
    ],
)
def test_check_samplable_refuses_when_no_token_is_left(
    params: SamplingParams, is_empty: bool
) -> None:
    params.validate(len(ALL))
    if not is_empty:
        params.check_samplable(len(ALL), EOS)
        return
    with pytest.raises(DomainError, match="allowed_token_ids") as refusal:
        params.check_samplable(len(ALL), EOS)
    assert refusal.value.reason == "SAMPLING_PARAMS_INVALID"


@pytest.mark.parametrize(
    "message",
    [
        api.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)),
        api.SamplingParams(stop_token_ids=[1] * 257),
        api.SamplingParams(allowed_token_ids=[1] * 16385),
        api.SamplingParams(bad_words_token_ids=[api.TokenSequence(token_ids=[1])] * 1025),
        api.SamplingParams(bad_words_token_ids=[api.TokenSequence(token_ids=[1] * 8193)]),
        api.SamplingParams(bad_words_token_ids=[api.TokenSequence()]),
    ],
)
def test_decode_refuses_lists_that_are_too_long(
    message: api.SamplingParams,
) -> None:
    (field, _), *_ = message.ListFields()
    with pytest.raises(DomainError, match=field.name) as refusal:
        decode_sampling_params(message)
    assert refusal.value.reason == "SAMPLING_PARAMS_INVALID"


def test_history_is_needed_when_a_bad_word_has_several_tokens() -> None:
    assert not SamplingParams(bad_words_token_ids=((1,), (2,))).needs_history
    assert SamplingParams(bad_words_token_ids=((1,), (2, 3))).needs_history
