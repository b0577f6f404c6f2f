"""Arguments of calls in notations other than JSON: rules of a grammar, by the schema of a tool.

A schema is spelled only where the parser reads each value back as one that the schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from splitserve_common import parse_json
from splitserve_gateway.grammars.json_schemas import (
    KEYWORDS,
    Change,
    changed,
    has_alternatives,
    is_refused_pattern,
)
from splitserve_gateway.grammars.lark import (
    ANY_TEXT,
    embedded,
    quoted,
    slashed,
    text_regex,
    texts_in_order,
    without,
)
from splitserve_text import JsonSchema, json_types

Schema = Mapping[str, Any]

_KEY = re.compile(r"[^<>\"\n]{1,128}")
_IDENTIFIER = re.compile(r"\w{1,128}")
_ANY_IDENTIFIER = r"/[A-Za-z_]\w{0,63}/"
_REF = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_OF_PARAMETERS = {"type", "properties", "required", "additionalProperties"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?", re.DOTALL)


class NotSpelled(Exception):
    """Values of a schema cannot be spelled in a notation."""


class Rules:
    """Rules and terminals of a grammar, each content once."""

    def __init__(self) -> None:
        """Begins without rules."""
        self._names: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def rule(self, text: str) -> str:
        """Returns the name of a rule that matches `text`."""
        return self._add("v", text)

    def terminal(self, text: str) -> str:
        """Returns the name of a terminal that matches `text`."""
        return self._add("V", text)

    def named(self, key: str, make: Callable[[], str]) -> str:
        """Returns the name of the rule for `key`; the first call builds its text with `make`.

        `make` may use the name of the rule, in a recursive schema.
        """
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"v{len(self._names)}"
            self._texts[name] = ""  # rules come in the order of their names
            self._texts[name] = make()
        return name

    def text(self) -> str:
        """Returns all rules, one a line."""
        return "".join(f"{name}: {text}\n" for name, text in self._texts.items())

    def _add(self, letter: str, text: str) -> str:
        name = self._names.setdefault(f"{letter} {text}", f"{letter}{len(self._names)}")
        self._texts[name] = text
        return name


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a tool. `definitions`: keywords that references lead to.

    `is_open`: there may be any others; only of tools that name none.
    """

    properties: Mapping[str, object]
    required: frozenset[str]
    definitions: Schema
    is_open: bool

    @classmethod
    def of(cls, schema: JsonSchema) -> Parameters:
        """Returns the parameters of a schema of an object. Raises NotSpelled."""
        whole: Any = parse_json(schema.schema)
        properties = whole.get("properties", {})
        required = frozenset(whole.get("required", ()))
        is_open = "properties" not in whole and whole.get("additionalProperties", True) is True
        has_more = whole.keys() & KEYWORDS - _OF_PARAMETERS
        if has_more or required - properties.keys() or not all(map(_is_near, _references(whole))):
            raise NotSpelled
        named = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        return cls(properties, required, named, is_open)

    def json_rule(self, schema: object, change: Change = lambda each, _: each) -> str:
        """Returns the right side of a rule for JSON of a parameter's `schema`.

        `change`: applied to each schema within. Raises NotSpelled if `schema` is not an object: the
        compiler says so of the whole schema.
        """
        if not isinstance(schema, Mapping):
            raise NotSpelled
        whole = changed({**schema, **self.definitions}, "", change)
        return embedded(JsonSchema(json.dumps(whole, ensure_ascii=False)))


def _references(schema: object) -> Iterator[object]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"]
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _is_near(reference: object) -> bool:
    return isinstance(reference, str) and _REF.fullmatch(reference) is not None


def _keywords(schema: Schema) -> set[str]:
    """Returns the keywords of `schema` that restrict a value."""
    return schema.keys() & KEYWORDS


# -- Parameters in tags ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TagSpelling:
    """Texts of a parameter in tags: before its key, before its value, and after its value.

    `closer`: text that ends values; `line`: what stands between it and the value, and before the
    value. `is_marked`: a tag says whether its value is a string. `or_json`: a JSON object may take
    the place of all parameters.
    """

    key: str
    value: tuple[str, ...]
    closer: str
    after: tuple[str, ...]
    line: str = ""
    is_marked: bool = False
    or_json: bool = True

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that models may have as special tokens."""
        return (self.key, *self.value, self.closer, *self.after)

    def arguments(self, schema: JsonSchema, rules: Rules) -> str:
        """Returns the name of a rule for the arguments of a tool. Raises NotSpelled."""
        try:
            parameters = Parameters.of(schema)
            if parameters.is_open:
                key = rules.terminal(_ANY_IDENTIFIER)
                return rules.rule(f"({self._parameter(key, self._text(rules), is_string=True)})*")
            return rules.rule(" ".join(self._parameters(parameters, rules)) or quoted(""))
        except NotSpelled:
            if not self.or_json:
                raise
        return rules.rule(f"{rules.rule(embedded(schema))} {quoted(chr(10))}")

    def _parameters(self, parameters: Parameters, rules: Rules) -> Iterator[str]:
        for key, schema in parameters.properties.items():
            if not _KEY.fullmatch(key) or key != key.strip():
                raise NotSpelled
            spelled = rules.rule(self._of_key(key, schema, parameters, rules))
            yield spelled if key in parameters.required else f"{spelled}?"

    def _of_key(self, key: str, schema: object, parameters: Parameters, rules: Rules) -> str:
        known = {} if schema is True else schema
        if not isinstance(known, Mapping):
            raise NotSpelled
        types = json_types(known)
        options: list[str] = []
        if not types or "string" in types:
            try:
                texts = " | ".join(self._strings(known, rules))
                options.append(self._parameter(quoted(key), f"({texts})", is_string=True))
            except NotSpelled:
                if not self.is_marked:
                    raise
        if not options or (self.is_marked and types - {"string"}):
            written = rules.rule(parameters.json_rule(known, self._kept_inside))
            value = f"{written} {quoted(self.line + self.closer)}"
            options.append(self._parameter(quoted(key), value, is_string=False))
        return " | ".join(options)

    def _parameter(self, key: str, value: str, *, is_string: bool) -> str:
        texts = list(self.value)
        if self.is_marked:
            texts[0] = texts[0].format(json.dumps(is_string))
        texts[-1] += self.line
        start, after = texts_in_order(texts), texts_in_order(self.after)
        return f"{quoted(self.key)} {key} {start} {value} {after}"

    def _strings(self, schema: Schema, rules: Rules) -> Iterator[str]:
        """Yields parts of rules for strings of `schema`, and null if it allows that."""
        end = self.line + self.closer
        if not isinstance(schema, Mapping):
            raise NotSpelled
        keywords, types = _keywords(schema), json_types(schema)
        if "type" in keywords and not types:
            raise NotSpelled
        if keywords in ({"anyOf"}, {"oneOf"}):
            yield from self._alternatives(schema, rules)
            return
        if keywords - {"type", "enum", "const", "pattern", "minLength", "maxLength", "allOf"}:
            raise NotSpelled
        if keywords & {"enum", "const"}:
            yield from self._choices(schema, end)
            return
        if "null" in types:
            yield quoted(f"null{end}")
        if types == {"null"}:
            return
        if keywords <= {"type"}:
            yield self._text(rules)
        else:
            regexes = [f"/{slashed(each)}/" for each in _regexes(schema)]
            yield rules.terminal(f"({' & '.join([*regexes, without(self.closer)])}) {quoted(end)}")

    def _alternatives(self, schema: Schema, rules: Rules) -> Iterator[str]:
        """Yields what `_strings` yields for each alternative that may be a string or null."""
        alternatives = schema.get("anyOf", schema.get("oneOf"))
        texts = [each for each in alternatives if json_types(each) & {"string"}]
        if not texts or (len(texts) > 1 and "oneOf" in schema):
            raise NotSpelled
        for each in alternatives:
            if not json_types(each) or json_types(each) & {"string", "null"}:
                yield from self._strings(each, rules)

    def _choices(self, schema: Schema, end: str) -> Iterator[str]:
        """Yields the values of `enum` or `const` that are strings or null. Raises NotSpelled."""
        if _keywords(schema) - {"type", "enum", "const"} or {"enum", "const"} <= schema.keys():
            raise NotSpelled
        values = schema.get("enum", [schema.get("const")])
        texts = [value for value in values if isinstance(value, str)]
        if not texts or any(self.closer in text for text in texts):
            raise NotSpelled
        if "null" in json_types(schema):
            # The parser takes this text for null.
            texts = [text for text in texts if text != "null"] + ["null"] * (None in values)
        yield from (quoted(text + end) for text in texts)

    def _text(self, rules: Rules) -> str:
        """Returns the name of a terminal for any text up to the end of the parameter."""
        free = rules.terminal(without(self.closer))
        return rules.terminal(f"{free} {quoted(self.line + self.closer)}")

    def _kept_inside(self, schema: dict[str, object], _path: str) -> dict[str, object]:
        """Returns `schema` for strings within JSON that do not end the parameter."""
        types = schema.get("type")
        is_string = "string" in types if isinstance(types, list) else types == "string"
        if not is_string or schema.keys() & {"enum", "const"}:
            return schema
        both = schema.get("allOf")
        others = both if isinstance(both, list) else []
        return {**schema, "allOf": [*others, {"pattern": _lacking(self.closer)}]}


def _regexes(schema: Schema) -> Iterator[str]:
    """Yields regexes that match whole texts of `schema`. Raises NotSpelled."""
    if "pattern" in schema:
        yield _whole(schema["pattern"])
    if schema.keys() & {"minLength", "maxLength"}:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        yield f"(.|\\n){{{least},{'' if most is None else int(most)}}}"
    for each in schema.get("allOf", ()):
        if not isinstance(each, Mapping) or _keywords(each) != {"pattern"}:
            raise NotSpelled
        yield _whole(each["pattern"])


def _whole(pattern: str) -> str:
    """Returns a regex for whole texts in which `pattern` is found. Raises NotSpelled."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise NotSpelled from error
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern)
    inner = pattern[begins : len(pattern) - bool(ends)]
    if has_alternatives(inner) or is_refused_pattern(inner):
        raise NotSpelled
    if re.search(r"[$^]", _CLASS_OR_ESCAPE.sub("", inner)):
        raise NotSpelled
    anything = ANY_TEXT.strip("/")
    return f"{'' if begins else anything}(?:{inner}){'' if ends else anything}"


@cache
def _lacking(text: str) -> str:
    r"""Returns a pattern of the texts without `text`, whose first character occurs once in it.

    The pattern follows the beginnings of `text`: another beginning may follow each.
    """
    first, rest = text[0], text[1:]
    begun = [rest[:length] for length in range(len(rest))]
    again = "|".join(f"{text_regex(each)}{first}" for each in begun)
    other = "|".join(f"{text_regex(each)}[^{first}{_in_class(rest[len(each)])}]" for each in begun)
    left = "|".join(map(text_regex, begun))
    return f"^(?:[^{first}]|{first}(?:{again})*(?:{other}))*(?:{first}(?:{again})*(?:{left}))?$"


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "]^\\-/" else char


# -- Literals of Python and of Gemma's notation ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiteralSpelling:
    """Notation of literals, and of the arguments of a call in it.

    `string`: terminal of strings. `strings`: a string in all its spellings. `words`: spellings of
    null, false and true. `separator`: between members. `key`: a key of an object, with what follows
    it; `argument`: of a call. `or_json`: literals may be JSON.
    """

    string: str
    strings: Callable[[str], tuple[str, ...]]
    words: tuple[str, str, str]
    separator: str
    key: Callable[[str], str]
    any_key: str
    argument: Callable[[str], str]
    or_json: bool
    texts: tuple[str, ...] = ()

    def arguments(self, schema: JsonSchema, rules: Rules) -> str:
        """Returns the name of a rule for the arguments of a tool. Raises NotSpelled."""
        parameters = Parameters.of(schema)
        literals = _Literals(self, parameters, rules)
        if parameters.is_open:
            key = rules.terminal(_ANY_IDENTIFIER)
            member = f"{key} {self.argument('')} {literals.value(True)}"
            return rules.rule(f"({literals.joined(member)})?")
        if not all(map(_IDENTIFIER.fullmatch, parameters.properties)):
            raise NotSpelled
        return literals.members(parameters.properties, parameters.required, self.argument)


@dataclass(frozen=True, slots=True)
class _Literals:
    """Rules for the values of one tool."""

    spelling: LiteralSpelling
    parameters: Parameters
    rules: Rules

    def value(self, schema: object) -> str:
        """Returns the name of a rule for values of `schema`. Raises NotSpelled."""
        known = {} if schema is True else schema
        try:
            if not isinstance(known, Mapping):
                raise NotSpelled
            options = [*self._options(known)]
            if not options:
                raise NotSpelled
            return self.rules.rule(" | ".join(options))
        except NotSpelled:
            if not self.spelling.or_json:
                raise
        return self.rules.rule(self.parameters.json_rule(known))

    def members(
        self, properties: Schema, required: Container[str], key: Callable[[str], str]
    ) -> str:
        """Returns the name of a rule for some or all `properties`, in their order."""
        rules, separator = self.rules, quoted(self.spelling.separator)
        # Rules for the rest of the members, if none or one was written before.
        first = rest = rules.rule(quoted(""))
        for name, schema in reversed([*properties.items()]):
            member = rules.rule(f"{key(name)} {self.value(schema)}")
            is_optional = name not in required
            first, rest = (
                rules.rule(f"{member} {rest}" + f" | {first}" * is_optional),
                rules.rule(f"{separator} {member} {rest}" + f" | {rest}" * is_optional),
            )
        return first

    def joined(self, member: str, least: int = 1, most: int | None = None) -> str:
        """Returns a repetition of `member`, `least` to `most` times, with separators."""
        bounds = f"{least - 1},{'' if most is None else most - 1}"
        return f"{member} ({quoted(self.spelling.separator)} {member}){{{bounds}}}"

    def _options(self, schema: Schema) -> Iterator[str]:
        keywords = _keywords(schema)
        if not keywords:
            yield self.rules.named("any", self._any)
        elif keywords == {"$ref"}:
            yield self._referred(schema["$ref"])
        elif keywords == {"anyOf"}:
            yield from map(self.value, schema["anyOf"])
        elif keywords in ({"enum"}, {"const"}, {"type", "enum"}, {"type", "const"}):
            for value in schema.get("enum", [schema.get("const")]):
                if "type" not in schema or json_types(schema) & _types_of(value):
                    yield self._constant(value)
        else:
            types = schema.get("type")
            for each in types if isinstance(types, list) else [types]:
                yield self._typed(each, schema, keywords - {"type"})

    def _any(self) -> str:
        rules, (null, false, true) = self.rules, self.spelling.words
        pair = f"{self.spelling.any_key} {self.value(True)}"
        options = (
            rules.terminal(self.spelling.string),
            *map(quoted, (null, false, true)),
            rules.rule(self.parameters.json_rule({"type": "number"})),
            f'"[" ({self.joined(self.value(True))})? "]"',
            f'"{{" ({self.joined(pair)})? "}}"',
        )
        return " | ".join(options)

    def _referred(self, reference: str) -> str:
        name = _REF.fullmatch(reference)
        schemas = {} if name is None else self.parameters.definitions.get(name[1], {})
        if name is None or name[2] not in schemas:
            raise NotSpelled
        key = f"ref {id(self.parameters)} {reference}"
        return self.rules.named(key, lambda: self.value(schemas[name[2]]))

    def _constant(self, value: object) -> str:
        null, false, true = self.spelling.words
        match value:
            case None:
                return quoted(null)
            case bool():
                return quoted(true if value else false)
            case str():
                return " | ".join(map(quoted, self.spelling.strings(value)))
            case int() | float():
                return quoted(json.dumps(value))
        raise NotSpelled

    def _typed(self, name: object, schema: Schema, keywords: set[str]) -> str:
        null, false, true = self.spelling.words
        match name:
            case "string" if not keywords:
                return self.rules.terminal(self.spelling.string)
            case "null" if not keywords:
                return quoted(null)
            case "boolean" if not keywords:
                return f"{quoted(false)} | {quoted(true)}"
            case "integer" | "number" if keywords <= _OF_NUMBERS:
                kept = {"type": name, **{key: schema[key] for key in keywords}}
                return self.rules.rule(self.parameters.json_rule(kept))
            case "array" if keywords <= {"items", "minItems", "maxItems"}:
                return self._array(schema)
            case "object" if keywords <= _OF_PARAMETERS:
                return self._object(schema)
        raise NotSpelled

    def _array(self, schema: Schema) -> str:
        item = self.value(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most < max(1, least):
            raise NotSpelled
        items = self.joined(item, max(1, least), most)
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _object(self, schema: Schema) -> str:
        properties, others = schema.get("properties"), schema.get("additionalProperties", True)
        required = schema.get("required", ())
        if properties is None:
            if required or others is False:
                raise NotSpelled
            pair = f"{self.rules.rule(self.spelling.any_key)} {self.value(others)}"
            return f'"{{" ({self.joined(pair)})? "}}"'
        if set(required) - properties.keys() or not all(map(_KEY.fullmatch, properties)):
            raise NotSpelled
        return f'"{{" {self.members(properties, required, self.spelling.key)} "}}"'


# Strings of one line in either quotes; the reader takes JSON's strings for Python's, too.
_PYTHON_STRING = r"/'([^'\\\n]|\\.)*'|\"([^\"\\\n]|\\.)*\"/"


def _python_strings(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((repr(text), json.dumps(text, ensure_ascii=False))))


def _types_of(value: object) -> set[str]:
    """Returns the JSON types of a scalar."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"integer", "number"} if value == int(value) else {"number"}
    return {"string"} if isinstance(value, str) else set()


def gemma_literals(quote: str) -> LiteralSpelling:
    """Returns Gemma's notation of literals. `quote`: text around strings, which are verbatim."""

    def strings(text: str) -> tuple[str, ...]:
        if quote in text:
            raise NotSpelled
        return (f"{quote}{text}{quote}",)

    def key(name: str) -> str:
        if not _IDENTIFIER.fullmatch(name):
            raise NotSpelled
        return quoted(f"{name}:")

    return LiteralSpelling(
        string=f"{quoted(quote)} ({without(quote)}) {quoted(quote)}",
        strings=strings,
        words=("null", "false", "true"),
        separator=",",
        key=key,
        any_key=f"{_ANY_IDENTIFIER} {quoted(':')}",
        argument=lambda name: quoted(f"{name}:"),
        or_json=False,
        texts=(quote,),
    )


PYTHON_LITERALS = LiteralSpelling(
    string=_PYTHON_STRING,
    strings=_python_strings,
    words=("None", "False", "True"),
    separator=", ",
    key=lambda name: f"({' | '.join(map(quoted, _python_strings(name)))}) {quoted(': ')}",
    any_key=f"{_PYTHON_STRING} {quoted(': ')}",
    argument=lambda name: quoted(f"{name}="),
    or_json=True,
)
