"""What is said of finished answers that schemas are checked against."""

from __future__ import annotations

import json
from typing import Any

import pytest

from splitserve_grammars.answer_process import check_answer

# A pattern of pydantic's Decimal with two places.
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,8}|(?=[\d.]{1,11}0*$)\d{0,8}\.\d{0,2}0*$)"
OLD = {"items": [{"type": "string"}], "additionalItems": False, "dependencies": {"a": ["b"]}}
IF = {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}}


def problem(schema: Any, text: str, label: str = "") -> str:  # noqa: ANN401
    return check_answer("answer", [label, json.dumps(schema), text]).error


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"p": {"pattern": DECIMAL}}}, '{"p": "12.34"}'),
        ({"multipleOf": 0.01}, "0.07"),
        ({"multipleOf": 0.01}, "3"),
        (IF, '{"a": 1, "b": 2}'),
        (IF, '{"c": 2}'),
        (OLD, '["a"]'),
        (OLD, '{"a": 1, "b": 2}'),
        ({"not": {"type": "null"}}, " 1 "),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {"const": 1}}}}, "[2, 1]"),
        ({"format": "email"}, '"an annotation"'),
    ],
)
def test_answer_is_right_when_it_matches_its_schema(schema: object, text: str) -> None:
    assert problem(schema, text) == ""


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"properties": {"p": {"pattern": DECIMAL}}}, '{"p": "-"}', "$.p: '-' does not match "),
        ({"multipleOf": 0.01}, "0.075", "$: 0.075 is not a multiple of 0.01"),
        (IF, '{"a": 1}', "$: 'b' is a required property"),
        (IF, "{}", "$: 'c' is a required property"),
        (OLD, "[1]", "$[0]: 1 is not of type 'string'"),
        (OLD, '["a", 1]', "$: Additional items"),
        (OLD, '{"a": 1}', "$: 'b' is a dependency of 'a'"),
        ({"not": {"type": "null"}}, "null", "$: "),
        ({"uniqueItems": True}, "[1, 2, 1]", "$: [1, 2, 1] has non-unique elements"),
        ({"propertyNames": {"maxLength": 1}}, '{"ab": 1}', "$: 'ab' is too long"),
        ({"dependentRequired": {"a": ["b"]}}, '{"a": 1}', "$: 'b' is a dependency of 'a'"),
        ({}, '{"a": 1', "$ is not JSON: "),
        ({}, "NaN", "$ is not JSON: "),
        ({}, "[" * 100_000, "$ is not JSON: it is nested too deeply"),
    ],
)
def test_problem_has_its_place_when_an_answer_breaks_its_schema(
    schema: object, text: str, expected: str
) -> None:
    found = problem(schema, text)

    assert found.startswith(expected)
    assert len(found) <= 300


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "http://127.0.0.1:9/schema"}, {"type": "text"}, {"pattern": "("}, {"pattern": 1}, []],
)
def test_answer_is_said_to_be_unchecked_when_its_schema_is_wrong(schema: object) -> None:
    """No schema is fetched: an address would be one of the gateway's network."""
    assert problem(schema, '"a"').startswith("not checked: ")


def test_problem_is_that_of_the_first_wrong_part() -> None:
    number = json.dumps({"type": "number"})
    texts = ["a ", number, "1", "b ", number, '"x"', "c ", number, "null"]

    assert check_answer("answer", texts).error == "b $: 'x' is not of type 'number'"
