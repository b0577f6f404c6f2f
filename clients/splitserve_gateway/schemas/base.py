"""Base of all request bodies: field types, and rules for refused and ignored fields.

A field that is not declared is refused by name unless null, and so is a field declared as
`Refused`. An `Ignored` field has no effect, and a header of the answer reports that. Null is the
same as absent. The rules hold at every depth; only `FreeObject` and `FreeJson` accept any keys.
With the context `IGNORES_UNKNOWN`, validation treats fields that are not declared as ignored.
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
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticUseDefault

# Ranges of the scheduler's messages; the scheduler checks narrower ranges.
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# No model takes longer prompts; validation of a list stops here.
MAX_PROMPT_TOKENS = 2**20
MAX_NESTING = 64
_CONTAINERS = (dict, list)


def at_most(count: int) -> FieldInfo:
    """Limits the length of a list. Validation of the list stops at its first error."""
    info: FieldInfo = Field(max_length=count, fail_fast=True)
    return info


def described(**schema: Any) -> FieldInfo:  # noqa: ANN401
    """Adds `schema` to the OpenAPI description only.

    The component that owns the limit checks it.
    """
    info: FieldInfo = Field(json_schema_extra=schema)
    return info


def needs_one_of(*names: str) -> JsonDict:
    """Describes in OpenAPI that exactly one of the fields is given and not null. Checks nothing."""
    is_given: JsonDict = {"not": {"type": "null"}}
    return {"oneOf": [{"required": [name], "properties": {name: is_given}} for name in names]}


TokenIds = Annotated[list[TokenId], at_most(MAX_PROMPT_TOKENS)]
Label = Annotated[str, Field(max_length=128)]
# `Id`: ids of tool calls. `Name`: names of models, tools and speakers.
Id = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(max_length=1024)]


def text_or_list(value: object) -> str:
    """Returns the union tag of a text or a list. Tags begin with `<`, which no field name does."""
    return "<list>" if isinstance(value, list) else "<text>"


def text_type(*allowed: str) -> BeforeValidator:
    """Validates the `type` of a content part. The error says that only text is served."""
    names = " or ".join(map(repr, allowed))
    message = f"must be {names}: images, audio and files are not served"

    def check(value: object) -> object:
        if value not in allowed:
            raise PydanticCustomError("part_not_text", message)
        return value

    return BeforeValidator(check)


def _refuse(value: object) -> object:
    if value is not None:
        raise PydanticCustomError("unsupported_field", "is not supported")
    return value


def _default_for_null(value: object) -> object:
    if value is None:
        raise PydanticUseDefault
    return value


def _check_nesting(value: object) -> object:
    """Raises a validation error beyond `MAX_NESTING` levels.

    Iterates by level, without recursion.
    """
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
    message = f"objects and lists may be nested at most {MAX_NESTING} deep"
    raise PydanticCustomError("nested_too_deeply", message)


# JSON with any keys and values, of bounded depth.
FreeJson = Annotated[Any, AfterValidator(_check_nesting)]
FreeObject = Annotated[dict[str, Any], AfterValidator(_check_nesting)]

Refused = Annotated[
    Any,
    AfterValidator(_refuse),
    WithJsonSchema({"type": "null", "description": "Refused unless null."}),
]
# Marks ignored fields in their metadata.
IGNORED = "ignored"
Ignored = Annotated[Any, IGNORED, Field(description="Accepted and ignored.")]
# Replaces null by the default of a field whose default is not None.
NULL_IS_DEFAULT = BeforeValidator(_default_for_null)
# Replaces an empty text by null.
EMPTY_IS_NULL = BeforeValidator(lambda value: None if value == "" else value)
Flag = Annotated[bool, NULL_IS_DEFAULT]

# Validation context in which fields that are not declared are ignored.
IGNORES_UNKNOWN: dict[str, object] = {"unknown_fields": "ignore"}
_MAX_NAME_CHARS = 80


def _check_unknown(value: object, info: ValidationInfo) -> bool:
    """Returns whether an undeclared field has a value, in place of the value."""
    if value is not None and info.context != IGNORES_UNKNOWN:
        raise PydanticCustomError("unknown_field", "is unknown")
    return value is not None


class ApiRequest(BaseModel):
    """Request body, or a part of one. Refuses undeclared fields by name unless they are null."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_check_unknown)]] = Field(
        init=False
    )
    _ignored: list[str] | None = PrivateAttr(None)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describes an object without undeclared fields, which have no use."""
        schema = handler(core_schema)
        handler.resolve_ref_schema(schema)["additionalProperties"] = False
        return schema

    @property
    def ignored(self) -> list[str]:
        """Paths of the ignored fields that were given, sorted, without list indices."""
        if self._ignored is None:
            found: set[str] = set()
            _find_ignored(self, "", found)
            self._ignored = sorted(found)
        return self._ignored

    def add_ignored(self, paths: Collection[str]) -> None:
        """Adds `paths` of parts of fields to the ignored fields."""
        if paths:
            self._ignored = sorted({*self.ignored, *paths})

    def forget(self, names: Collection[str]) -> None:
        """Sets the fields `names` to None, to free memory. `ignored` still includes their parts."""
        self._ignored = self.ignored
        for name in names:
            setattr(self, name, None)


class SchedulingFields(ApiRequest):
    """Fields of every request that schedulers run."""

    model: Name | None = None
    user: Label | None = None
    priority: Annotated[Int32 | None, described(minimum=-100, maximum=100)] = None
    cache_salt: Label | None = None
    num_public_prefix_tokens: Annotated[Int32 | None, described(minimum=0)] = None
    deadline_s: Annotated[float, Field(gt=0, le=10**9)] | None = None
    target_itl_ms: Annotated[Int32 | None, described(minimum=1, maximum=60_000)] = None
    request_id: Label | None = None


class ClientFields(ApiRequest):
    """Fields that clients of several services send with every request and that have no effect."""

    metadata: Ignored = None
    keep_alive: Ignored = None
    num_ctx: Ignored = None
    provider: Ignored = None


class IgnoredFields(ClientFields):
    """Fields that clients send with requests for text and that have no effect here."""

    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    client_metadata: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    transforms: Ignored = None
    usage: Ignored = None
    verbosity: Ignored = None
    spaces_between_special_tokens: Ignored = None


class StreamOptions(ApiRequest):
    """Options of a stream (`stream_options`).

    `continuous_usage_stats`: every event has the usage so far.
    """

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Ignored = None


def _find_ignored(body: ApiRequest, path: str, found: set[str]) -> None:
    ignored = ignored_names(type(body))
    extra = body.model_extra or {}
    # A name of the caller's may have any characters and any length.
    found.update(
        path + ascii(name[:_MAX_NAME_CHARS])[1:-1] for name, is_given in extra.items() if is_given
    )
    for name in body.model_fields_set - extra.keys():
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
    """Returns the ignored fields of `schema` itself, mapped to their names in the API."""
    fields = schema.model_fields.items()
    return {name: field.alias or name for name, field in fields if IGNORED in field.metadata}
