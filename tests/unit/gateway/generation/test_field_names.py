"""What is refused, by the names that callers of each endpoint know."""

from __future__ import annotations

import pytest

from splitserve_client import ChatTemplateFailed, InvalidRequest
from splitserve_gateway.generation.choices import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    RESPONSE_FIELDS,
    FieldNames,
    chat_fields,
    completion_fields,
    naming,
    refusal,
    response_fields,
)
from splitserve_gateway.http.errors import ApiError, invalid
from splitserve_gateway.schemas.chat import ChatRequest, CompletionRequest

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


@pytest.mark.parametrize(
    ("inside", "response"),
    [
        ("messages", "input"),
        ("response_format", "text.format"),
        ("response_format.type", "text.format.type"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tools.12.function.parameters.type", "tools.12.parameters.type"),
        ("tools", "tools"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("tool_choice.allowed_tools.tools.3.function.name", "tool_choice.tools.3.name"),
        ("structured_outputs.regex", "structured_outputs.regex"),
        ("messages_of_others", "messages_of_others"),
    ],
)
def test_field_of_a_chat_is_named_as_in_responses(inside: str, response: str) -> None:
    with pytest.raises(ApiError) as raised, naming(RESPONSE_FIELDS):
        raise invalid(f"{inside}: is wrong", inside)

    assert raised.value.param == response
    assert raised.value.message == f"{response}: is wrong"


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


@pytest.mark.parametrize(
    ("names", "field"), [(CHAT_FIELDS, "messages"), (RESPONSE_FIELDS, "input")]
)
def test_template_that_fails_is_about_what_it_was_given(names: FieldNames, field: str) -> None:
    with pytest.raises(ApiError) as raised, naming(names):
        raise ChatTemplateFailed("roles must alternate")

    assert (raised.value.param, raised.value.code) == (field, "chat_template_failed")


def test_names_are_those_of_the_fields_that_were_given() -> None:
    chat = ChatRequest(prompt_token_ids=[1], max_completion_tokens=5, guided_regex="a")
    assert chat_fields(chat)["prompt"] == "prompt_token_ids"
    assert chat_fields(chat)["max_tokens"] == "max_completion_tokens"
    assert chat_fields(chat)["grammar"] == response_fields(chat)["grammar"] == "guided_regex"
    formatted = ChatRequest(response_format={})
    assert response_fields(formatted)["grammar"] == "text.format"
    assert chat_fields(ChatRequest())["grammar"] == "tools"
    assert (
        completion_fields(CompletionRequest(prompt_token_ids=[1]))["prompt"] == "prompt_token_ids"
    )
    assert completion_fields(CompletionRequest(prompt="a"))["prompt"] == "prompt"
