"""Refusal at arrival, by name and with the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scheduler_service.scheduler.engine.planning import fits, prepare_request
from scheduler_service.scheduler.values import (
    BeamParams,
    Feature,
    Request,
    SamplingParams,
    SchedulingParams,
    SequenceStatus,
)
from splitserve_contract import DomainError
from tests.support.core.driver import EOS, VOCAB_SIZE, CoreDriver, make_config


def refusal_of(prompt: int | list[int], driver: CoreDriver | None = None, **request: object) -> str:
    """Reason and message of the refusal, after which nothing of the request is left."""
    driver = driver or CoreDriver(num_device_blocks=15, block_size=4)
    with pytest.raises(DomainError) as refusal:
        driver.add(prompt, **request)  # type: ignore[arg-type]
    assert driver.core.num_waiting == 0
    assert driver.plan() is None
    return f"{refusal.value.reason}: {refusal.value.message}"


SMALL = {"num_device_blocks": 15}  # Of 60 slots.
CROSS = {"features": frozenset({Feature.CROSS_ATTENTION})}
SHORT = {**CROSS, "max_encoder_tokens": 8}
BIASES = {"features": frozenset({Feature.LOGIT_BIAS})}
ADAPTERS = {"features": frozenset({Feature.ADAPTERS}), "max_adapters": 0}
BEAM = BeamParams(2)


@pytest.mark.parametrize(
    ("prompt", "request_values", "config", "message"),
    [
        (0, {}, {}, "PROMPT_EMPTY: prompt_token_ids is empty; allowed: 1 or more tokens"),
        (200, {}, {}, "PROMPT_TOO_LONG: the prompt has 200 tokens; allowed: at most 199"),
        (200, {}, {}, "This model's maximum context length is 200 tokens"),
        (1, {"encoder": [5] * 9}, SHORT, "This model's maximum context length is 8 tokens"),
        (60, {}, SMALL, "NEVER_FITS_KV_CACHE: prompt and max_tokens make 61 tokens"),
        (10, {"max_tokens": 51}, SMALL, "holds 60 (15 blocks of 4)"),
        # Two full blocks of the prompt are shared; each sequence has two of its own.
        (9, {"n": 7, "max_tokens": 7}, SMALL, "for each of 7 sequences"),
        (2, {"encoder": [5] * 16}, {"num_device_blocks": 4, **CROSS}, "NEVER_FITS_KV_CACHE: "),
        ([1, -1, 2], {}, {}, "TOKEN_OUT_OF_RANGE: token id is -1; allowed: 0 to 99"),
        ([1, VOCAB_SIZE], {}, {}, "TOKEN_OUT_OF_RANGE: token id is 100"),
        (2, {"n": 2, "resume": [[5], [6, VOCAB_SIZE]]}, {}, "TOKEN_OUT_OF_RANGE: "),
        # The executor would refuse the whole step of others.
        (2, {"encoder": [5, -1]}, CROSS, "TOKEN_OUT_OF_RANGE: "),
        (2, {"encoder": [5, VOCAB_SIZE]}, CROSS, "TOKEN_OUT_OF_RANGE: "),
        (2, {"logit_bias": {3: -math.inf}}, BIASES, "executors do not support token_constraints"),
        # It would wait for ever.
        (2, {"scheduling": SchedulingParams(adapter="a")}, ADAPTERS, "FEATURE_UNSUPPORTED: "),
    ],
)
def test_add_refuses_what_can_never_run(
    prompt: int | list[int], request_values: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    assert message in refusal_of(prompt, CoreDriver(**config), **request_values)


@pytest.mark.parametrize(
    ("prompt", "request_values", "config"),
    [
        (59, {}, SMALL),
        (10, {"max_tokens": 50}, SMALL),
        (9, {"n": 6, "max_tokens": 7}, SMALL),
        (2, {"logit_bias": {3: -100.0}, "max_tokens": 1}, BIASES),
        (2, {"encoder": [], "max_tokens": 1}, CROSS),
    ],
)
def test_add_accepts_what_just_fits(
    prompt: int, request_values: dict[str, Any], config: dict[str, Any]
) -> None:
    driver = CoreDriver(**config)
    request = driver.add(prompt, **request_values)
    driver.run()
    assert request.error is None


def test_request_fits_when_its_unfinished_sequences_fit() -> None:
    small = make_config(num_device_blocks=15, block_size=4, max_num_seqs=1)
    params = SamplingParams(n=3, max_tokens=40)
    request = Request.create("r", [1, 2, 3, 4, 5], params, arrival=1, seed=0)
    assert not fits(request, small)
    for sequence in request.sequences[1:]:
        sequence.status = SequenceStatus.FINISHED
    assert fits(request, small)
    prepare_request(request, small)
    assert request.stop_len == 45


def test_stop_length_is_the_same_when_sequences_have_ended() -> None:
    config = make_config(num_device_blocks=15, block_size=4, max_num_seqs=3)
    params = SamplingParams(n=3, max_tokens=None)
    request = Request.create("r", [1, 2, 3, 4, 5], params, arrival=1, seed=0)
    prepare_request(request, config)
    before = request.stop_len
    request.sequences[0].status = SequenceStatus.FINISHED
    prepare_request(request, config)
    assert request.stop_len == before < config.max_model_len


# -- sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 9}, "asks for 9 sequences; allowed: at most max_num_seqs 8"),
        ({"best_of": 9}, "asks for 9 sequences; allowed: at most max_num_seqs 8"),
        ({"beam": BeamParams(9)}, "asks for 9 sequences; allowed: at most max_num_seqs 8"),
        ({"n": 3, "best_of": 2}, "best_of is 2; allowed: [3,"),
        ({"n": 3, "beam": BEAM}, "beam_search.width is 2; allowed: [3,"),
        ({"beam": BeamParams(0)}, "beam_search.width is 0"),
        ({"beam": BeamParams(17)}, "beam_search.width is 17; allowed: [1, 16]"),
        ({"beam": BeamParams(2, length_penalty=float("nan"))}, "beam_search.length_penalty"),
        ({"beam": BEAM, "best_of": 2}, "best_of"),
        ({"beam": BEAM, "temperature": 0.5}, "temperature is 0.5"),
        ({"beam": BEAM, "top_k": 5}, "top_k"),
        ({"beam": BEAM, "top_p": 0.5}, "top_p"),
        ({"beam": BEAM, "repetition_penalty": 1.5}, "repetition_penalty"),
        ({"beam": BEAM, "logit_bias": {3: 1.0}}, "logit_bias"),
        ({"beam": BEAM, "allowed_token_ids": frozenset({3})}, "allowed_token_ids"),
        ({"beam": BEAM, "bad_words_token_ids": ((3,),)}, "bad_words_token_ids"),
        ({"allowed_token_ids": frozenset({EOS}), "min_tokens": 1}, "allowed_token_ids"),
        ({"beam": BEAM, "num_logprobs": 0}, "num_logprobs"),
        ({"beam": BEAM, "num_prompt_logprobs": 0}, "num_prompt_logprobs"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_add_names_the_parameter_that_makes_no_sense(params: dict[str, Any], named: str) -> None:
    message = refusal_of(2, **params)
    assert message.startswith("SAMPLING_PARAMS_INVALID")
    assert named in message


# -- features ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_values", "feature"),
    [
        ({"num_logprobs": 0}, "logprobs"),
        ({"best_of": 2}, "logprobs"),
        ({"beam": BEAM}, "logprobs"),
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
    assert message == f"FEATURE_UNSUPPORTED: the executors do not support {feature}"


@pytest.mark.parametrize(
    "params",
    [{"min_p": 0.1}, {"top_p": 0.9}, {"min_p": 0.1, "top_p": 0.9, "temperature": 0.0}],
)
def test_add_accepts_truncation_when_all_versions_of_sampling_agree(params: dict[str, Any]) -> None:
    CoreDriver(features=frozenset()).add(2, **params)


@pytest.mark.parametrize(("resume", "reason"), [([[1, EOS]], "stop"), ([[1, 2, 3, 4]], "length")])
def test_add_finishes_a_request_that_has_all_its_tokens(
    resume: list[list[int]], reason: str
) -> None:
    driver = CoreDriver()
    request = driver.add(2, max_tokens=4, resume=resume)
    assert request.finish_reason
    assert request.finish_reason.value == reason
    assert driver.core.take_ended().finished == [request]
    assert driver.plan() is None
