"""Grammars of requests: which grammar a request asks for, and whether it compiles."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from splitserve_common import parse_json
from splitserve_gateway.grammars.json_schemas import compilable, looser
from splitserve_gateway.grammars.trials import (
    CheckerLimits,
    FairTrials,
    GrammarCheckUnavailable,
)
from splitserve_grammars import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    NOT_CHECKED,
    TOO_LARGE,
    TOO_SLOW,
)
from splitserve_text import (
    Choices,
    Grammar,
    JsonSchema,
    Lark,
    Regex,
)

_TOO_DEEP = "is nested too deeply"


class GrammarChecker:
    """Checks that grammars compile, each content once, and finished answers against schemas.

    A check of a grammar does not show whether the model's tokens can spell it, whether special
    tokens that it names exist, or how many states it has while an answer is generated. An executor
    that finds such a fault fails the request.
    """

    def __init__(self, limits: CheckerLimits | None = None) -> None:
        """Starts no process; the first check does."""
        limits = limits or CheckerLimits()
        self._grammars = FairTrials(limits)
        self._answers = FairTrials(limits, "answer")

    async def check(self, field: str, source: Source, tenant: str = "") -> Grammar:
        """Returns `source` in a dialect of the contract, if it compiles.

        `field`: named in errors. Raises GrammarRefused with the compiler's message, and
        GrammarCheckUnavailable.
        """
        if isinstance(source, Choices):
            checked_text(field, "".join(source.texts))
            return source  # plain texts need no compiler
        kind, text = _kind_and_text(source)
        checked_text(field, text)
        verdict = await self._grammars.verdict(kind, [text], tenant)
        if verdict.error:
            raise GrammarRefused(field, verdict.error)
        if not isinstance(source, Gbnf):
            return source
        return Lark(verdict.lark)

    def of(self, tenant: str) -> TenantChecker:
        """Returns the checker for requests of one tenant."""
        return TenantChecker(self, tenant)

    async def problem(self, texts: Sequence[str], tenant: str = "") -> str | None:
        """Returns how a finished answer breaks its schemas, or why that is unknown; None for right.

        `texts`: label, schema and JSON text of each part.
        """
        try:
            error = (await self._answers.verdict("answer", texts, tenant)).error
        except GrammarCheckUnavailable as unavailable:
            return f"{NOT_CHECKED}{unavailable}"
        return f"{NOT_CHECKED}{error}" if error in (TOO_LARGE, TOO_SLOW) else error or None

    async def close(self) -> None:
        """Ends the processes and fails the checks in progress."""
        await self._grammars.close()
        await self._answers.close()


@dataclass(frozen=True, slots=True)
class TenantChecker:
    """GrammarChecker for one tenant."""

    checker: GrammarChecker
    tenant: str

    async def check(self, field: str, source: Source) -> Grammar:
        """Checks a grammar as `GrammarChecker.check` does, in turns of this tenant."""
        return await self.checker.check(field, source, self.tenant)

    async def problem(self, texts: Sequence[str]) -> str | None:
        """Checks a finished answer as `GrammarChecker.problem` does, in turns of this tenant."""
        return await self.checker.problem(texts, self.tenant)

    async def check_requested(self, requested: RequestedGrammar) -> CheckedGrammar:
        """Checks a requested grammar, and looser forms of a schema that need not hold entirely.

        The loosest allows any object, or any value, where the schema takes too long to compile.
        Raises GrammarRefused, which names what is wrong with the schema itself, and
        GrammarCheckUnavailable.
        """
        field = requested.field
        try:
            return CheckedGrammar(await self.check(field, requested.source))
        except GrammarRefused as refused:
            loose_schema = requested.loose_schema
            if loose_schema is None:
                raise
            for form in looser(loose_schema):
                with suppress(GrammarRefused):
                    source = JsonSchema(json_text(field, form.schema))
                    ignored = tuple(f"{field}.{path}" for path in form.ignored)
                    grammar = await self.check(field, source)
                    return CheckedGrammar(grammar, ignored, json_text(field, loose_schema))
            if refused.message not in (TOO_LARGE, TOO_SLOW):
                raise
            loosest = ANY_OBJECT if loose_schema.get("type") == "object" else JsonSchema("{}")
            return CheckedGrammar(loosest, (field,), json_text(field, loose_schema))


def _kind_and_text(source: JsonSchema | Regex | Lark | Gbnf) -> tuple[str, str]:
    match source:
        case JsonSchema(text):
            return "json_schema", text
        case Regex(text):
            return "regex", text
        case Lark(text):
            return "lark", text
        case Gbnf(text):
            return "gbnf", text


# -- Grammar fields of requests, in OpenAI's and vLLM's forms --------------------------------------

ANY_OBJECT = JsonSchema('{"type": "object"}')


class GrammarRefused(Exception):
    """Refusal of a request's grammar or tools; `field` names the field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Gbnf:
    """Grammar in llama.cpp's dialect (`root ::= ...`), not yet converted to Lark."""

    grammar: str


Source = Grammar | Gbnf


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """Requested grammar and the name of its request field.

    `loose_schema`: the schema of `source`, if parts that cannot be compiled are to be ignored.
    """

    field: str
    source: Source
    loose_schema: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """Grammar that compiles.

    `ignored`: paths of parts of its schema that it does not enforce. `unenforced`: that schema
    as JSON text; None if the grammar enforces it.
    """

    grammar: Grammar
    ignored: tuple[str, ...] = ()
    unenforced: str | None = None


def requested_grammar(body: Mapping[str, object]) -> RequestedGrammar | None:
    """Returns the grammar that fields of `body` ask for; None without one. `body`: parsed JSON.

    The fields are `response_format`, `structured_outputs` and the older `guided_json`,
    `guided_regex`, `guided_choice`, `guided_grammar`. Takes about as long as parsing `body` did.
    Raises GrammarRefused, also for two grammars.
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
    """Returns `value` as JSON text, keys in their order. Raises GrammarRefused."""
    try:
        return checked_text(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(field, f"{_TOO_DEEP}, or is not JSON") from error


def checked_text(field: str, text: object) -> str:
    """Returns `text` if it is a string of allowed length for grammars. Raises GrammarRefused."""
    if not isinstance(text, str) or not text:
        raise GrammarRefused(field, "must be a non-empty text")
    if len(text) > MAX_GRAMMAR_BYTES or len(_utf8(field, text)) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(field, f"must have at most {MAX_GRAMMAR_BYTES} bytes")
    return text


def _utf8(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise GrammarRefused(field, "contains a lone surrogate") from error


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
    """Reads a `json_schema` format. Without `strict`, parts that do not compile are ignored."""
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
    return _schema(f"{field}.schema", schema, is_loose=not form.get("strict"))


def _schema(field: str, value: object, *, is_loose: bool = False) -> RequestedGrammar:
    schema = compilable_schema(field, _object(field, value))
    source = JsonSchema(json_text(field, schema))
    return RequestedGrammar(field, source, schema if is_loose else None)


def compilable_schema(field: str, schema: Mapping[str, object]) -> Mapping[str, object]:
    """Returns `schema` as the compiler takes it. Raises GrammarRefused."""
    try:
        return compilable(schema)
    except RecursionError as error:
        raise GrammarRefused(field, _TOO_DEEP) from error


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
    if not isinstance(value, str):
        return _schema(field, value)
    text = checked_text(field, value)
    try:
        schema = parse_json(text)
    except ValueError:
        schema = None
    # The compiler tells what is wrong with another text.
    is_schema = isinstance(schema, dict)
    return _schema(field, schema) if is_schema else RequestedGrammar(field, JsonSchema(text))


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
    for key, value in form.items():
        if key not in known and value is not None:
            raise GrammarRefused(f"{field}.{key[:64]}", "is an unknown field")


_KINDS = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}
_FIELDS: dict[str, Callable[[str, object], RequestedGrammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
