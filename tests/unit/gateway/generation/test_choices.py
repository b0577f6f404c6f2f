"""Names of fields in refusals, and ids of requests."""

from __future__ import annotations

import re

import pytest

from splitserve_client import InvalidRequest
from splitserve_common import LogContext, log_context
from splitserve_gateway.generation import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    RESPONSE_FIELDS,
    FieldNames,
    answer_id,
    naming,
    refusal,
    upstream_id,
)
from splitserve_gateway.http import ApiError, invalid

ALL = (COMPLETION_FIELDS, CHAT_FIELDS, RESPONSE_FIELDS)


@pytest.mark.parametrize(
    ("message", "reason", "completion", "chat", "response"),
    [
        ("temperature is 101; allowed", "", "temperature", "temperature", "temperature"),
        ("num_logprobs is 21; allowed", "", "logprobs", "top_logprobs", "top_logprobs"),
        ("logit_bias[5] is 101; allowed", "", "logit_bias", "logit_bias", "logit_bias"),
        ("bad_words_token_ids has 9 tokens", "", "bad_words", "bad_words", "bad_words"),
        ("max_tokens is 0; allowed", "", "max_tokens", "max_tokens", "max_output_tokens"),
        ("beam_search.width is 17; allowed", "", "n", "n", "use_beam_search"),
        ("n, best_of or beam_search.width asks", "", "n", "n", "use_beam_search"),
        ("tenant has 129 characters", "", "user", "user", "user"),
        ("the prompt has 9 tokens", "PROMPT_TOO_LONG", "prompt", "messages", "input"),
        ("prompt_token_ids is empty", "PROMPT_EMPTY", "prompt", "messages", "input"),
        ("token id is 9", "TOKEN_OUT_OF_RANGE", "prompt", "messages", "input"),
        ("prompt and max_tokens make 9", "NEVER_FITS_KV_CACHE", "prompt", "messages", "input"),
        ("sequences do not fit", "NEVER_FITS_KV_CACHE", None, None, None),
    ],
)
def test_refusal_names_the_field_as_the_caller_does(
    message: str, reason: str, completion: str | None, chat: str | None, response: str | None
) -> None:
    error = InvalidRequest(message, reason or "SAMPLING_PARAMS_INVALID")
    for names, expected in zip(ALL, (completion, chat, response), strict=True):
        assert refusal(error, names).param == expected
        assert refusal(error, names).status == 400


def test_message_names_the_field_as_the_caller_does() -> None:
    def message(text: str, reason: str = "SAMPLING_PARAMS_INVALID") -> str:
        return refusal(InvalidRequest(text, reason), RESPONSE_FIELDS).message

    assert message("max_tokens is 0; allowed") == "max_output_tokens is 0; allowed"
    assert message("logit_bias[5] is 101") == "logit_bias[5] is 101"
    assert message("prompt_token_ids is empty", "PROMPT_EMPTY") == "input is empty"


def test_message_names_what_a_field_cannot_be_combined_with() -> None:
    message = "guided_regex: cannot be combined with response_format.json_schema.schema"
    with pytest.raises(ApiError) as raised, naming(RESPONSE_FIELDS):
        raise invalid(message, "guided_regex")

    assert raised.value.message == "guided_regex: cannot be combined with text.format.schema"


@pytest.mark.parametrize("names", ALL)
def test_names_stay_when_they_are_given_twice(names: FieldNames) -> None:
    for inside in names:
        with pytest.raises(ApiError) as raised, naming(names), naming(names):
            raise invalid("wrong", inside.replace("*", "0"))
        assert raised.value.param == names[inside].replace("*", "0")


def test_ids_are_those_of_the_http_request_that_is_answered() -> None:
    token = log_context.set(LogContext("req_abc"))
    try:
        assert (answer_id(None), answer_id("job")) == ("abc", "job")
        assert upstream_id(None, 3) == "abc.3"
        assert upstream_id("job", 0) == "job.abc.0"
        assert len(upstream_id("j" * 128, 9999)) < 128
    finally:
        log_context.reset(token)


def test_ids_are_new_ones_where_no_http_request_is_answered() -> None:
    assert re.fullmatch(r"[0-9a-f]{32}\.0", upstream_id(None, 0))
    assert answer_id(None) != answer_id(None)
