"""docs/openai.md has every field, and no other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.resources import Completions, Embeddings, chat
from openai.resources.audio import Transcriptions, Translations
from openai.resources.responses import Responses
from pydantic import BaseModel, ValidationError

from splitserve_gateway.schemas import (
    ApiRequest,
    ChatMessage,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    PoolingRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    StreamOptions,
    TokenizeRequest,
    TranscriptionRequest,
    TranslationRequest,
    UnloadAdapterRequest,
    ignored_names,
)

TEXT = (Path(__file__).parents[3] / "docs" / "openai.md").read_text(encoding="utf-8")
FIELDS = TEXT.split("## Fields\n")[1].split("## Answers")[0]
# Anthropic's API has its own page.
MESSAGES = "splitserve_gateway.schemas.messages"
SCHEMAS: list[type[BaseModel]] = [
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ClassifyRequest,
    PoolingRequest,
    TokenizeRequest,
    DetokenizeRequest,
    StreamOptions,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    TranscriptionRequest,
    TranslationRequest,
]


class TranslationForm(TranslationRequest):
    """A form with its file."""

    file: str


class TranscriptionForm(TranscriptionRequest):
    """A form with its file."""

    file: str


@pytest.mark.parametrize("schema", SCHEMAS)
def test_doc_names_every_field(schema: type[BaseModel]) -> None:
    named = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", FIELDS))))
    assert schema.model_fields.keys() - named == set()


def test_doc_names_what_is_otherwise_in_responses_in_their_section() -> None:
    section = FIELDS.split("### Responses")[1].split("###")[0]
    named = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", section))))
    assert ResponsesRequest.__annotations__.keys() - named == set()


def test_doc_says_which_fields_are_ignored() -> None:
    rows = FIELDS.split("| accepted and ignored |")[1].split("\n\n")[0]
    firsts = re.findall(r"^\| (`[^|]+) \|", rows, re.MULTILINE)
    paths = [path for first in firsts for path in re.findall(r"`([a-z_.]+)`", first)]
    schemas = [each for each in schemas_of(ApiRequest) if each.__module__ != MESSAGES]
    ignored = {name for schema in schemas for name in ignored_names(schema).values()}
    assert {path.split(".")[-1] for path in paths} == ignored


def schemas_of(schema: type[ApiRequest]) -> list[type[ApiRequest]]:
    below = [found for each in schema.__subclasses__() for found in schemas_of(each)]
    return [schema, *below]


def test_null_is_as_absent_in_every_field() -> None:
    required: dict[object, Any] = {ChatMessage: {"role": "assistant"}}
    for schema in schemas_of(ApiRequest):
        for name, field in schema.model_fields.items():
            if not field.is_required():
                made = schema.model_construct(**required.get(schema, {}))
                made.__pydantic_validator__.validate_assignment(made, name, None)
                assert getattr(made, name) == field.default


def test_values_may_be_nested_as_documented() -> None:
    (most,) = re.findall(r"may be nested at most (\d+) deep", FIELDS)
    deep: Any = {}
    for _ in range((int(most) - 2) // 2):
        deep = {"a": [deep]}
    ChatRequest(chat_template_kwargs={"a": deep})
    with pytest.raises(ValidationError, match=f"nested at most {most} deep"):
        ChatRequest(chat_template_kwargs={"a": [deep]})


@pytest.mark.parametrize(
    ("method", "schema"),
    [
        (Completions.create, CompletionRequest),
        (chat.Completions.create, ChatRequest),
        (Responses.create, ResponsesRequest),
        (Embeddings.create, EmbeddingRequest),
        (Transcriptions.create, TranscriptionForm),
        (Translations.create, TranslationForm),
    ],
)
def test_every_parameter_of_the_official_client_is_a_field(
    method: Callable[..., object], schema: type[BaseModel]
) -> None:
    of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    parameters = inspect.signature(method).parameters.keys() - of_the_client
    assert len(parameters) >= 5
    assert parameters - schema.model_fields.keys() == set()


def test_tables_name_no_field_that_there_is_not() -> None:
    known = {name for schema in SCHEMAS for name in schema.model_fields}
    rows = re.findall(r"^\| (`[^|]+) \|", FIELDS, re.MULTILINE)
    named = {name.split(".")[-1] for row in rows for name in re.findall(r"`([^`]+)`", row)}
    ignored = {name for schema in schemas_of(ApiRequest) for name in ignored_names(schema).values()}
    assert named <= known | ignored
