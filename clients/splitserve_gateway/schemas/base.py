"""What all requests have in common: which fields there are, and what becomes of the others.

The rule: a field that is not declared is refused by name. So is one that is declared as `Refused`
and not null. An `Ignored` one changes nothing, and the answer says so in a header. Null is as
absent, always. It holds at every depth; only `FreeObject` and `FreeJson` have any keys.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUseDefault

# What fits the scheduler's messages; narrower ranges are for it to judge.
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Longer prompts fit no model; lists are not read on beyond it.
MAX_PROMPT_TOKENS = 2**20
MAX_NESTING = 64
_CONTAINERS = (dict, list)


def at_most(count: int) -> FieldInfo:
    """Of a list that is read no further than to the first thing that is wrong with it."""
    info: FieldInfo = Field(max_length=count, fail_fast=True)
    return info


def described(**schema: Any) -> FieldInfo:  # noqa: ANN401
    """For the OpenAPI description alone: what is checked elsewhere, by whoever knows the limit."""
    info: FieldInfo = Field(json_schema_extra=schema)
    return info


def needs_one_of(*names: str) -> JsonDict:
    """For the OpenAPI description alone: fields of which exactly one is given, and not null."""
    is_given: JsonDict = {"not": {"type": "null"}}
    return {"oneOf": [{"required": [name], "properties": {name: is_given}} for name in names]}


TokenIds = Annotated[list[TokenId], at_most(MAX_PROMPT_TOKENS)]
Label = Annotated[str, Field(max_length=128)]
# Of calls of tools, by whoever made them; and names of models, tools and whoever speaks.
Id = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(max_length=1024)]


def text_or_list(value: object) -> str:
    """The tag of a value that is a text or a list; tags begin with a sign that no field has."""
    return "<list>" if isinstance(value, list) else "<text>"


def text_type(*allowed: str) -> BeforeValidator:
    """For the `type` of a part: says that nothing but text is served."""
    names = " or ".join(map(repr, allowed))
    message = f"must be {names}: images, audio and files are not served"

    def check(value: object) -> object:
        if value not in allowed:
            raise PydanticCustomError("part_not_text", message)
        return value

    return BeforeValidator(check)


def _refuse(value: object) -> object:
    if value is not None:
        raise PydanticCustomError("unsupported_field", "is not supported here")
    return value


def _default_for_null(value: object) -> object:
    if value is None:
        raise PydanticUseDefault
    return value


def _check_nesting(value: object) -> object:
    """Level by level: nothing recurses."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _CONTAINERS)
        ]
        if not level:
            return value
    message = f"objects and lists may be nested {MAX_NESTING} deep"
    raise PydanticCustomError("nested_too_deeply", message)


# Of any keys and values, within bounds.
FreeJson = Annotated[Any, AfterValidator(_check_nesting)]
FreeObject = Annotated[dict[str, Any], AfterValidator(_check_nesting)]

Refused = Annotated[
    Any,
    AfterValidator(_refuse),
    WithJsonSchema({"type": "null", "description": "Refused unless null."}),
]
# In the metadata of fields that nothing depends on.
IGNORED = "ignored"
Ignored = Annotated[Any, IGNORED, Field(description="Accepted and ignored.")]
# Of a field with a default that is not None; null gives that.
NULL_IS_DEFAULT = BeforeValidator(_default_for_null)
Flag = Annotated[bool, NULL_IS_DEFAULT]


class ApiRequest(BaseModel):
    """A request body, or a part of one. A field that is not declared is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    _ignored: list[str] | None = PrivateAttr(None)

    @property
    def ignored(self) -> list[str]:
        """The ignored fields that were given: paths, without the indices of lists."""
        if self._ignored is None:
            found: set[str] = set()
            _find_ignored(self, "", found)
            self._ignored = sorted(found)
        return self._ignored

    def forget(self, names: Collection[str]) -> None:
        """Drops the values of fields; which of what they had was ignored is still known."""
        self._ignored = self.ignored
        for name in names:
            setattr(self, name, None)


class IgnoredFields(ApiRequest):
    """What official clients send and nothing here depends on."""

    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    spaces_between_special_tokens: Ignored = None


class StreamOptions(ApiRequest):
    """`stream_options`. `continuous_usage_stats`: usage so far in every event."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Ignored = None


def _find_ignored(body: ApiRequest, path: str, found: set[str]) -> None:
    ignored = ignored_names(type(body))
    for name in body.model_fields_set:
        value = getattr(body, name)
        if name in ignored:
            if value is not None:
                found.add(path + ignored[name])
        elif isinstance(value, ApiRequest):
            _find_ignored(value, f"{path}{name}.", found)
        elif isinstance(value, list) and value and isinstance(value[0], ApiRequest):
            inside = f"{path}{name}."
            for item in value:
                _find_ignored(item, inside, found)


@functools.cache
def ignored_names(schema: type[ApiRequest]) -> dict[str, str]:
    """The ignored fields of `schema` itself, and what callers call them."""
    fields = schema.model_fields.items()
    return {name: field.alias or name for name, field in fields if IGNORED in field.metadata}
