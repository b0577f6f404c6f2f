"""Process that checks finished answers against JSON Schemas; see `trial`.

A caller's regular expression, or `uniqueItems`, can take minutes: so answers are checked where
grammars are tried, in a process that can be killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry

from splitserve_common import parse_json
from splitserve_grammars.limits import NOT_CHECKED
from splitserve_grammars.trial import GrammarTrialResult
from splitserve_grammars.trial_process import serve

_MAX_CHARS = 300
_OLD_ITEMS = Draft201909Validator.VALIDATORS["items"]
_NEW_ITEMS = Draft202012Validator.VALIDATORS["items"]


def _items(validator: Any, items: Any, instance: Any, schema: Any) -> Iterator[Any]:  # noqa: ANN401
    check = _OLD_ITEMS if isinstance(items, list) else _NEW_ITEMS
    yield from check(validator, items, instance, schema) or ()


def _multiple_of(validator: Any, divisor: Any, instance: Any, _schema: Any) -> Iterator[Any]:  # noqa: ANN401
    # In binary 0.07 is no multiple of 0.01.
    if validator.is_type(instance, "number") and Decimal(str(instance)) % Decimal(str(divisor)):
        yield ValidationError(f"{instance} is not a multiple of {divisor}")


# Draft 2020-12, with the older keywords that the compiler of grammars knows, too.
_VALIDATOR = extend(
    Draft202012Validator,
    {
        "multipleOf": _multiple_of,
        "items": _items,
        "additionalItems": Draft201909Validator.VALIDATORS["additionalItems"],
        "dependencies": Draft7Validator.VALIDATORS["dependencies"],
    },
)


def check_answer(_kind: str, texts: Sequence[str]) -> GrammarTrialResult:
    """Returns the first problem of an answer as the error of a result.

    `texts`: label, schema and JSON text of each part of the answer, one after the other.
    """
    for label, schema, text in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        if problem := _problem(schema, text):
            return GrammarTrialResult(f"{label}{problem}"[:_MAX_CHARS])
    return GrammarTrialResult()


def _problem(schema_text: str, text: str) -> str:
    try:
        instance = parse_json(text, parse_constant=_refuse_constant)
    except ValueError as error:
        return f"$ is not JSON: {error}"
    try:
        schema = parse_json(schema_text)
        # Without a registry of its own it would fetch schemas from the network.
        validator = validator_for(schema, _VALIDATOR)(schema, registry=Registry())
        found = best_match(validator.iter_errors(instance))
    except Exception as error:  # the schema is a stranger's, and valid for another library
        reason, *_ = str(error).splitlines() or [""]
        return f"{NOT_CHECKED}{type(error).__name__.strip('_')}: {reason}"
    return "" if found is None else f"{found.json_path}: {found.message}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has {name}")


def main(max_address_bytes: int, stack_bytes: int) -> None:
    """Checks answers until the input ends."""
    serve(check_answer, max_address_bytes, stack_bytes)
