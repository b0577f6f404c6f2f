"""The grammar that a request asks for, in OpenAI's words or in vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from splitserve_client.types import Choices, Grammar, JsonSchema, Lark, Regex
from splitserve_grammars.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES

ANY_OBJECT = JsonSchema('{"type": "object"}')


class GrammarRefused(Exception):
    """A request's grammar, or tools, cannot be done; `field` says which one."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Gbnf:
    """A grammar in llama.cpp's dialect (`root ::= ...`), not yet converted to Lark."""

    grammar: str


Source = Grammar | Gbnf


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar, and the field of the request that has it."""

    field: str
    source: Source


def requested_grammar(body: Mapping[str, object]) -> RequestedGrammar | None:
    """What the fields of `body`, parsed JSON of any shape, ask for.

    They are `response_format` (Chat), `text` (Responses), `structured_outputs` and the older
    `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`. Takes about as long as parsing
    them did. Raises GrammarRefused, also if there are two.
    """
    found = [
        grammar
        for field, read in _FIELDS.items()
        if body.get(field) is not None and (grammar := read(field, body[field])) is not None
    ]
    if len(found) > 1:
        raise GrammarRefused(found[1].field, f"cannot be combined with {found[0].field}")
    return found[0] if found else None


def json_text(field: str, value: object) -> str:
    """`value` as JSON, keys in their order. Raises GrammarRefused."""
    try:
        return checked_text(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(field, "is nested too deeply, or no JSON") from error


def checked_text(field: str, text: object) -> str:
    """`text`, if it is a text that a grammar may be. Raises GrammarRefused."""
    if not isinstance(text, str) or not text:
        raise GrammarRefused(field, "must be a text that is not empty")
    if len(text) > MAX_GRAMMAR_BYTES or len(_utf8(field, text)) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(field, f"must have at most {MAX_GRAMMAR_BYTES} bytes")
    return text


def _utf8(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise GrammarRefused(field, "has half of a surrogate pair") from error


def _response_format(field: str, value: object) -> RequestedGrammar | None:
    form = _object(field, value)
    kind = form.get("type")
    if kind == "json_schema":
        _only(field, form, ("type", "json_schema"))
        return _json_schema(f"{field}.json_schema", form.get("json_schema"), ())
    return _plain_format(field, form)


def _plain_format(field: str, form: Mapping[str, object]) -> RequestedGrammar | None:
    _only(field, form, ("type",))
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return RequestedGrammar(field, ANY_OBJECT)
    raise GrammarRefused(f"{field}.type", 'must be "text", "json_object" or "json_schema"')


def _json_schema(field: str, value: object, more: tuple[str, ...]) -> RequestedGrammar:
    """The schema holds with `strict` and without it."""
    form = _object(field, value)
    _only(field, form, ("name", "description", "schema", "strict", *more))
    for key in ("name", "description"):
        if not isinstance(form.get(key, ""), str | None):
            raise GrammarRefused(f"{field}.{key}", "must be a text")
    if not isinstance(form.get("strict"), bool | None):
        raise GrammarRefused(f"{field}.strict", "must be true or false")
    schema = form.get("schema")
    if schema is None:
        return RequestedGrammar(field, ANY_OBJECT)
    field = f"{field}.schema"
    return RequestedGrammar(field, JsonSchema(json_text(field, _object(field, schema))))


def _structured_outputs(field: str, value: object) -> RequestedGrammar | None:
    form = {key: item for key, item in _object(field, value).items() if item not in (None, False)}
    _only(field, form, ("json_object", *_KINDS))
    if len(form) > 1:
        first, second, *_ = form
        raise GrammarRefused(f"{field}.{second}", f"cannot be combined with {field}.{first}")
    for key, item in form.items():
        if key == "json_object":
            return RequestedGrammar(f"{field}.{key}", ANY_OBJECT)
        return _KINDS[key](f"{field}.{key}", item)
    return None


def _json(field: str, value: object) -> RequestedGrammar:
    if isinstance(value, str):
        return RequestedGrammar(field, JsonSchema(checked_text(field, value)))
    return RequestedGrammar(field, JsonSchema(json_text(field, _object(field, value))))


def _regex(field: str, value: object) -> RequestedGrammar:
    return RequestedGrammar(field, Regex(checked_text(field, value)))


def _choice(field: str, value: object) -> RequestedGrammar:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise GrammarRefused(field, f"must be a list of 1 to {MAX_CHOICES} texts")
    texts = [checked_text(field, text) for text in value]
    checked_text(field, "".join(texts))
    return RequestedGrammar(field, Choices(tuple(dict.fromkeys(texts))))


def _grammar(field: str, value: object) -> RequestedGrammar:
    text = checked_text(field, value)
    return RequestedGrammar(field, Gbnf(text) if "::=" in text else Lark(text))


def _object(field: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise GrammarRefused(field, "must be an object")
    return value


def _only(field: str, form: Mapping[str, object], known: tuple[str, ...]) -> None:
    for key in form:
        if key not in known:
            raise GrammarRefused(f"{field}.{key[:64]}", "is not known here")


_KINDS = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}
_FIELDS: dict[str, Callable[[str, object], RequestedGrammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
