"""docs/anthropic.md has every field, and no other; the schemas have every field of the client."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from anthropic.resources.beta.messages import Messages as BetaMessages
from anthropic.resources.messages import Messages

from splitserve_gateway.schemas import (
    ApiRequest,
    CountTokensRequest,
    MessagesRequest,
    ignored_names,
)

TEXT = (Path(__file__).parents[3] / "docs" / "anthropic.md").read_text(encoding="utf-8")
FIELDS = TEXT.split("## Fields\n")[1].split("## Answers")[0]
CLIENTS_OWN = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def names_in(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", text))))


def schemas() -> list[type[ApiRequest]]:
    def below(schema: type[ApiRequest]) -> list[type[ApiRequest]]:
        found = [each for sub in schema.__subclasses__() for each in below(sub)]
        return [schema, *found]

    return [each for each in below(ApiRequest) if each.__module__ == MessagesRequest.__module__]


def test_doc_names_every_field() -> None:
    assert len(schemas()) > 10
    for schema in schemas():
        assert schema.model_fields.keys() - names_in(FIELDS) - {"json_schema"} == set()


def test_doc_says_which_fields_are_ignored() -> None:
    rows = FIELDS.split("| accepted and ignored |")[1].split("\n\n")[0]
    firsts = re.findall(r"^\| (`[^|]+) \|", rows, re.MULTILINE)
    outer = {"thinking", "output_config"}
    ignored = {name for schema in schemas() for name in ignored_names(schema).values()}
    assert names_in(" ".join(firsts)) - outer == ignored


@pytest.mark.parametrize(
    ("method", "schema"),
    [
        (Messages.create, MessagesRequest),
        (BetaMessages.create, MessagesRequest),
        (Messages.count_tokens, CountTokensRequest),
        (BetaMessages.count_tokens, CountTokensRequest),
    ],
)
def test_every_parameter_of_the_official_client_is_a_field(
    method: Callable[..., object], schema: type[ApiRequest]
) -> None:
    parameters = inspect.signature(method).parameters.keys() - CLIENTS_OWN
    assert len(parameters) >= 5
    assert parameters - schema.model_fields.keys() == set()
