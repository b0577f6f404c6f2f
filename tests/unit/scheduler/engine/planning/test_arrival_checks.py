"""Refusal at arrival, by name and with the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scheduler_service.scheduler.engine.planning.arrival_checks import fits, prepare_request
from scheduler_service.scheduler.values.config import Feature
from scheduler_service.scheduler.values.request import Request, SchedulingParams, SequenceStatus
from scheduler_service.scheduler.values.sampling_params import BeamParams, SamplingParams
from splitserve_rpc.domain_error import DomainError
from tests.support.core.driver import EOS, VOCAB_SIZE, CoreDriver, make_config


def refusal_of(prompt: int | list[int], driver: CoreDriver | None = None, **request: object) -> str:
    """Reason and message of the refusal, after which nothing of the request is left."""
    driver = driver or CoreDriver(num_device_blocks=15, block_size=4)
    with pytest.raises(DomainError) as refusal:
        driver.add(prompt, **request)  # type: ignore[arg-type]
    assert driver.core.num_waiting == 0
    assert driver.plan() is None
    return f"{refusal.value.reason}: {refusal.value.message}"


# -- prompts and lengths -----------------------------------------------------------------------


def test_add_refuses_when_the_prompt_is_empty() -> None:
    assert refusal_of(0) == "PROMPT_EMPTY: prompt_token_ids is empty; allowed: 1 or more tokens"


def test_add_refuses_when_the_prompt_leaves_no_room_in_the_model() -> None:
    message = refusal_of(200)
    assert message.startswith("PROMPT_TOO_LONG: the prompt has 200 tokens; allowed: at most 199")


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(60, None), (10, 51)])
def test_add_refuses_with_the_numbers_when_it_never_fits(
    prompt_len: int, max_tokens: int | None
) -> None:
    message = refusal_of(prompt_len, max_tokens=max_tokens)
    assert message.startswith("NEVER_FITS_KV_CACHE: prompt and max_tokens make 61 tokens")
    assert "holds 60 (15 blocks of 4)" in message


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(59, None), (10, 50)])
def test_add_accepts_when_it_just_fits(prompt_len: int, max_tokens: int | None) -> None:
    driver = CoreDriver(num_device_blocks=15, block_size=4)
    request = driver.add(prompt_len, max_tokens=max_tokens)
    driver.run()
    assert request.error is None


@pytest.mark.parametrize(("width", "fits"), [(6, True), (7, False)])
def test_add_counts_what_sequences_share_once_when_there_are_several(
    width: int, fits: bool
) -> None:
    # Two full blocks of the prompt are shared; each sequence has two of its own.
    driver = CoreDriver(num_device_blocks=15, block_size=4)
    request: dict[str, Any] = {"n": width, "max_tokens": 7}
    if fits:
        driver.add(9, **request)
        driver.run()
    else:
        assert f"for each of {width} sequences" in refusal_of(9, driver, **request)


def test_request_fits_when_those_of_its_sequences_fit_that_go_on() -> None:
    small = make_config(num_device_blocks=15, block_size=4, max_num_seqs=1)
    params = SamplingParams(n=3, max_tokens=40)
    request = Request.create("r", [1, 2, 3, 4, 5], params, arrival=1, seed=0)
    assert not fits(request, small)
    for sequence in request.sequences[1:]:
        sequence.status = SequenceStatus.FINISHED
    assert fits(request, small)
    prepare_request(request, small)
    assert request.stop_len == 45


def test_add_refuses_when_the_encoder_alone_fills_the_pool() -> None:
    driver = CoreDriver(
        num_device_blocks=4, features=frozenset({Feature.CROSS_ATTENTION}), max_model_len=20
    )
    assert refusal_of(2, driver, encoder=[5] * 16).startswith("NEVER_FITS_KV_CACHE")


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_add_refuses_when_a_prompt_token_is_outside_the_vocabulary(token_id: int) -> None:
    message = refusal_of([1, token_id, 2])
    assert message == f"TOKEN_OUT_OF_RANGE: token id is {token_id}; allowed: 0 to 99"


def test_add_refuses_when_a_resumed_token_is_outside_the_vocabulary() -> None:
    assert refusal_of(2, n=2, resume=[[5], [6, VOCAB_SIZE]]).startswith("TOKEN_OUT_OF_RANGE")


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_add_refuses_when_an_encoder_token_is_outside_the_vocabulary(token_id: int) -> None:
    # The executor would refuse the whole step of whoever runs beside it.
    driver = CoreDriver(features=frozenset({Feature.CROSS_ATTENTION}))
    assert refusal_of(2, driver, encoder=[5, token_id]).startswith("TOKEN_OUT_OF_RANGE")


def test_add_takes_the_encoder_as_absent_when_it_has_no_tokens() -> None:
    driver = CoreDriver(features=frozenset({Feature.CROSS_ATTENTION}))
    driver.add(2, encoder=[], max_tokens=1)
    driver.run()


# -- sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"n": 9}, {"best_of": 9}, {"beam": BeamParams(9)}])
def test_add_refuses_when_more_sequences_are_asked_for_than_run_side_by_side(
    params: dict[str, Any],
) -> None:
    message = refusal_of(2, **params)
    assert message.startswith("SAMPLING_PARAMS_INVALID")
    assert "asks for 9 sequences; allowed: at most max_num_seqs 8" in message


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 3, "best_of": 2}, "best_of is 2; allowed: [3,"),
        ({"n": 3, "beam": BeamParams(2)}, "beam_search.width is 2; allowed: [3,"),
        ({"beam": BeamParams(0)}, "beam_search.width is 0"),
        ({"beam": BeamParams(17)}, "beam_search.width is 17; allowed: [1, 16]"),
        ({"beam": BeamParams(2, length_penalty=float("nan"))}, "beam_search.length_penalty"),
        ({"beam": BeamParams(2), "best_of": 2}, "best_of"),
        ({"beam": BeamParams(2), "temperature": 0.5}, "temperature is 0.5"),
        ({"beam": BeamParams(2), "top_k": 5}, "top_k"),
        ({"beam": BeamParams(2), "top_p": 0.5}, "top_p"),
        ({"beam": BeamParams(2), "repetition_penalty": 1.5}, "repetition_penalty"),
        ({"beam": BeamParams(2), "logit_bias": {3: 1.0}}, "logit_bias"),
        ({"beam": BeamParams(2), "allowed_token_ids": frozenset({3})}, "allowed_token_ids"),
        ({"beam": BeamParams(2), "bad_words_token_ids": ((3,),)}, "bad_words_token_ids"),
        ({"allowed_token_ids": frozenset({EOS}), "min_tokens": 1}, "allowed_token_ids"),
        ({"beam": BeamParams(2), "num_logprobs": 0}, "num_logprobs"),
        ({"beam": BeamParams(2), "num_prompt_logprobs": 0}, "num_prompt_logprobs"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_add_names_the_parameter_when_a_combination_makes_no_sense(
    params: dict[str, Any], named: str
) -> None:
    message = refusal_of(2, **params)
    assert message.startswith("SAMPLING_PARAMS_INVALID")
    assert named in message


# -- features ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_values", "feature"),
    [
        ({"num_logprobs": 0}, "logprobs"),
        ({"best_of": 2}, "logprobs"),
        ({"beam": BeamParams(2)}, "logprobs"),
        ({"num_prompt_logprobs": 0}, "prompt_logprobs"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"min_tokens": 2}, "logit_bias"),
        ({"allowed_token_ids": frozenset({3})}, "token_constraints"),
        ({"bad_words_token_ids": ((3, 4),)}, "token_constraints"),
        ({"min_p": 0.1, "top_p": 0.9}, "min_p_after_top_p"),
        ({"scheduling": SchedulingParams(adapter="a")}, "adapters"),
        ({"encoder": [5]}, "cross_attention"),
    ],
)
def test_add_names_the_feature_when_the_executor_lacks_it(
    request_values: dict[str, Any], feature: str
) -> None:
    message = refusal_of(2, CoreDriver(features=frozenset()), **request_values)
    assert message == f"FEATURE_UNSUPPORTED: the executors cannot do {feature}"


def test_add_names_token_constraints_when_the_executor_has_only_finite_biases() -> None:
    driver = CoreDriver(features=frozenset({Feature.LOGIT_BIAS}))
    message = refusal_of(2, driver, logit_bias={3: -math.inf})
    assert message == "FEATURE_UNSUPPORTED: the executors cannot do token_constraints"
    driver.add(2, logit_bias={3: -100.0})


@pytest.mark.parametrize(
    "params",
    [{"min_p": 0.1}, {"top_p": 0.9}, {"min_p": 0.1, "top_p": 0.9, "temperature": 0.0}],
)
def test_add_accepts_truncation_when_all_versions_of_sampling_agree(params: dict[str, Any]) -> None:
    CoreDriver(features=frozenset()).add(2, **params)


def test_add_refuses_an_adapter_when_no_step_may_have_one() -> None:
    # It would wait for ever.
    driver = CoreDriver(features=frozenset({Feature.ADAPTERS}), max_adapters=0)
    message = refusal_of(2, driver, scheduling=SchedulingParams(adapter="a"))
    assert message.startswith("FEATURE_UNSUPPORTED")


@pytest.mark.parametrize(("resume", "reason"), [([[1, EOS]], "stop"), ([[1, 2, 3, 4]], "length")])
def test_add_finishes_a_request_at_once_when_it_has_all_its_tokens(
    resume: list[list[int]], reason: str
) -> None:
    driver = CoreDriver()
    request = driver.add(2, max_tokens=4, resume=resume)
    assert request.finish_reason
    assert request.finish_reason.value == reason
    assert driver.core.take_ended().finished == [request]
    assert driver.plan() is None
