"""docs/openai.md has every field, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from splitserve_gateway.schemas.base import IgnoredFields, StreamOptions
from splitserve_gateway.schemas.chat import ChatRequest
from splitserve_gateway.schemas.completions import CompletionRequest
from splitserve_gateway.schemas.responses import ResponsesRequest
from splitserve_gateway.schemas.tokenization import DetokenizeRequest, TokenizeRequest

TEXT = (Path(__file__).parents[3] / "docs" / "openai.md").read_text(encoding="utf-8")
FIELDS = TEXT.split("## Which fields there are")[1].split("## Answers")[0]
SCHEMAS: list[type[BaseModel]] = [
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    StreamOptions,
]


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
    firsts = " ".join(re.findall(r"^\| (`[^|]+) \|", rows, re.MULTILINE))
    named = set(re.findall(r"`([a-z_]+)`", firsts))
    assert named == IgnoredFields.model_fields.keys()


def test_tables_name_no_field_that_there_is_not() -> None:
    known = {name for schema in SCHEMAS for name in schema.model_fields}
    rows = re.findall(r"^\| (`[^|]+) \|", FIELDS, re.MULTILINE)
    named = {name.split(".")[-1] for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert named <= known
