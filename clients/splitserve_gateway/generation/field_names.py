"""What callers call a field, which depends on the endpoint: a refusal names it as they do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from splitserve_client import ChatTemplateFailed, InvalidRequest
from splitserve_gateway.http.errors import ApiError, api_error
from splitserve_gateway.schemas.chat import ChatRequest
from splitserve_gateway.schemas.completions import CompletionRequest
from splitserve_gateway.schemas.sampling import GRAMMAR_FIELDS, SamplingFields

# By the names that the scheduler has, or chats; `*` is an index.
FieldNames = Mapping[str, str]

COMPLETION_FIELDS: FieldNames = {
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "bad_words_token_ids": "bad_words",
    "beam_search": "use_beam_search",
    "beam_search.width": "n",
    "beam_search.length_penalty": "length_penalty",
    "tenant": "user",
    "deadline": "deadline_s",
    "resume_sequences": "n",
    "prompt": "prompt",
}
CHAT_FIELDS: FieldNames = {
    **COMPLETION_FIELDS,
    "num_logprobs": "top_logprobs",
    "prompt": "messages",
}
RESPONSE_FIELDS: FieldNames = {
    **CHAT_FIELDS,
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "n": "use_beam_search",
    "beam_search.width": "use_beam_search",
    "resume_sequences": "use_beam_search",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.allowed_tools.tools.*.function": "tool_choice.tools.*",
    "tool_choice.function": "tool_choice",
    "tools.*.function": "tools.*",
}
_OF_PROMPTS = ("PROMPT_EMPTY", "PROMPT_TOO_LONG", "TOKEN_OUT_OF_RANGE")


def completion_fields(body: CompletionRequest) -> FieldNames:
    """What `body` has them called."""
    prompt = "prompt" if body.prompt_token_ids is None else "prompt_token_ids"
    return {**COMPLETION_FIELDS, "prompt": prompt, "grammar": _grammar_field(body)}


def chat_fields(body: ChatRequest) -> FieldNames:
    """What `body` has them called."""
    names = {**CHAT_FIELDS, "grammar": _grammar_field(body)}
    if body.prompt_token_ids is not None:
        names["prompt"] = "prompt_token_ids"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def response_fields(chat: ChatRequest) -> FieldNames:
    """What the response that is asked for by `chat` has them called."""
    field = _grammar_field(chat)
    return {**RESPONSE_FIELDS, "grammar": RESPONSE_FIELDS.get(field, field)}


def _grammar_field(body: SamplingFields) -> str:
    given = (name for name in GRAMMAR_FIELDS if getattr(body, name) is not None)
    return next(given, "tools")


@contextmanager
def naming(names: FieldNames) -> Iterator[None]:
    """What is refused in here is refused by these names. Raises ApiError for it."""
    try:
        yield
    except ApiError as error:
        _rename(error, names)
        raise
    except InvalidRequest as error:
        raise refusal(error, names) from error
    except ChatTemplateFailed as error:
        refused = api_error(error)
        _rename(refused, names)
        raise refused from error


def refusal(error: InvalidRequest, names: FieldNames) -> ApiError:
    """The scheduler's refusal, with the field at fault, which its message names first."""
    refused = api_error(error)
    name = re.split(r"[ ,\[]", error.message, maxsplit=1)[0]
    if error.reason in _OF_PROMPTS:
        refused.message = re.sub("^prompt_token_ids", "prompt", refused.message)
        name = "prompt"
    elif name not in names:
        name = name.partition(".")[0]
        if name not in names and name not in SamplingFields.model_fields:
            return refused
    refused.param = name
    _rename(refused, names)
    return refused


def _rename(error: ApiError, names: FieldNames) -> None:
    """In a message it is the first word, or what something cannot be combined with."""
    inside = error.param
    if inside is None:
        return
    error.param = _renamed(inside, names)
    if re.match(rf"{re.escape(inside)}(?![\w.])", error.message):
        error.message = f"{error.param}{error.message[len(inside) :]}"
    before, combined, other = error.message.partition(" combined with ")
    if combined:
        error.message = f"{before}{combined}{_renamed(other, names)}"


def _renamed(path: str, names: FieldNames) -> str:
    for name in sorted(names, key=len, reverse=True):
        pattern = re.escape(name).replace(r"\*", r"(\d+)") + r"(?![^.])"
        if re.match(pattern, path):
            return re.sub(pattern, names[name].replace("*", r"\1"), path, count=1)
    return path
