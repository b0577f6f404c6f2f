"""Whatever is sampled under the masks of a grammar is what the grammar says, by other judges."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from typing import Any

import pytest
import regress
from jsonschema import Draft202012Validator, FormatChecker, ValidationError, validators

from executor_service.steps import Grammar
from tests.support.grammars.json_schemas import REFUSED, SUPPORTED, Schema, random_schema
from tests.support.grammars.sampled_texts import byte_level_texts, json_schema, sample_texts

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "100"))
# So many texts of each schema by hand, with different seeds.
NUM_ROUNDS = max(1, NUM_EXAMPLES // 50)
# A text that does not end says nothing; a few are let go.
MIN_ENDED_RATIO = 0.9

_DURATION = r"P(?!$)(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?"
_CHECKS: dict[str, Callable[[str], object]] = {
    "date-time": lambda text: datetime.fromisoformat(_without_leap_second(text)),
    "date": date.fromisoformat,
    "time": lambda text: time.fromisoformat(_without_leap_second(text)),
    "duration": lambda text: _match(_DURATION, text),
    "email": lambda text: _match(r"[^@\s]+@[^@\s]+|\".*\"@[^@\s]+", text),
    "hostname": lambda text: _match(r"([a-zA-Z0-9-]{1,63}\.)*[a-zA-Z0-9-]{1,63}\.?", text),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": lambda text: _match(r"[a-zA-Z][a-zA-Z0-9+.-]*:\S*", text),
}


def _without_leap_second(text: str) -> str:
    return text.upper().replace(":60", ":59")


def _pattern(
    validator: Draft202012Validator, pattern: str, instance: object, schema: Schema
) -> Iterator[ValidationError]:
    """As JSON Schema has it, of ECMA-262: Python's space characters are some more."""
    if isinstance(instance, str) and regress.Regex(pattern, "u").find(instance) is None:
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


_Validator = validators.extend(Draft202012Validator, {"pattern": _pattern})


def _match(pattern: str, text: str) -> None:
    if not re.fullmatch(pattern, text):
        raise ValueError(text)


def _format_checker() -> FormatChecker:
    checker = FormatChecker(formats=())
    for name, check in _CHECKS.items():

        def holds(instance: object, check: Callable[[str], object] = check) -> bool:
            if isinstance(instance, str):
                check(instance)
            return True

        checker.checks(name, raises=ValueError)(holds)
    return checker


def check_all(schemas: list[Schema], seed: int) -> None:
    """Texts of all schemas are valid, and nearly all of them come to an end."""
    checker = _format_checker()
    sampled = sample_texts(byte_level_texts(), [json_schema(schema) for schema in schemas], seed)
    assert [one.error for one in sampled] == [""] * len(schemas)
    ended = [(one, schema) for one, schema in zip(sampled, schemas, strict=True) if one.text]
    for one, schema in ended:
        assert one.text is not None
        value: Any = json.loads(one.text)
        validator = _Validator(schema, format_checker=checker)
        errors = [error.message for error in validator.iter_errors(value)]
        assert not errors, (schema, one.text, errors)
    assert len(ended) >= MIN_ENDED_RATIO * len(schemas)


def test_judge_reads_patterns_as_json_schema_has_them() -> None:
    address = _Validator({"type": "string", "pattern": r"^\S+@\S+$"})
    assert address.is_valid("a@\x1d.b")
    assert not address.is_valid("a@ b")


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_text_is_valid_when_it_was_sampled_by_a_schema(seed: int) -> None:
    check_all(list(SUPPORTED), seed)


def test_text_is_valid_when_schemas_are_nested_at_random() -> None:
    generator = random.Random(1)
    check_all([random_schema(generator) for _ in range(2 * NUM_EXAMPLES)], seed=2)


def test_schemas_are_refused_by_name_when_they_say_what_is_not_supported() -> None:
    sampled = sample_texts(byte_level_texts(), [json_schema(schema) for schema, _ in REFUSED])
    for one, (schema, word) in zip(sampled, REFUSED, strict=True):
        assert word in one.error, (schema, one.error, one.text)


REGEXES = (
    "[a-z]{3}",
    "(ab|cd)*e?",
    r"[0-9]+(\.[0-9]{1,2})?",
    "a/b|c\\\\d",
    "[^a-z]{1,4}",
    "(?i)yes|no",
    "(?s).{1,5}",
    "[äöü🦊]{2,4}",
    "",
    "x{0,30}y",
)


def test_text_matches_when_it_was_sampled_by_a_regex() -> None:
    grammars = [Grammar("regex", (regex,)) for regex in REGEXES for _ in range(10)]
    for one in sample_texts(byte_level_texts(), grammars):
        assert not one.error, one
        if one.text is not None:
            assert re.fullmatch(one.grammar.texts[0], one.text), one


def test_text_is_a_choice_when_it_was_sampled_by_choices() -> None:
    choices = ("yes", "no", "yes, but", 'a "quoted" \\ one', "two\nlines", "🦊 ß", "</s>", "\x01\t")
    grammars = [Grammar("choices", choices[:count]) for count in range(1, 9) for _ in range(60)]
    sampled = sample_texts(byte_level_texts(), grammars)
    assert [one.text in one.grammar.texts for one in sampled] == [True] * len(sampled)
    assert {one.text for one in sampled} == set(choices)


def test_text_is_balanced_when_it_was_sampled_by_a_context_free_grammar() -> None:
    lark = 'start: list\nlist: "(" (list | WORD)* ")"\nWORD: /[ab]/\n'
    seen = set()
    for one in sample_texts(byte_level_texts(), [Grammar("lark", (lark,)) for _ in range(100)]):
        if one.text is None:
            continue
        depths = [
            one.text[:end].count("(") - one.text[:end].count(")") for end in range(len(one.text))
        ]
        assert set(one.text) <= set("()ab")
        assert min(depths[1:], default=1) > 0
        assert one.text.count("(") == one.text.count(")")
        seen.add(one.text)
    assert len(seen) > 10
