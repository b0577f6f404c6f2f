"""What all requests have in common: which fields there are, and what becomes of the others.

The rule: a field that is not declared is refused by name. So is one that is declared as `Refused`
and not null. An `Ignored` one changes nothing, and the answer says so in a header. Null is as
absent, always.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUseDefault

# What fits the scheduler's messages; narrower ranges are for it to judge.
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Longer prompts fit no model; lists are not read on beyond it.
MAX_PROMPT_TOKENS = 2**20


def at_most(count: int) -> FieldInfo:
    """Of a list that is read no further than to the first thing that is wrong with it."""
    info: FieldInfo = Field(max_length=count, fail_fast=True)
    return info


TokenIds = Annotated[list[TokenId], at_most(MAX_PROMPT_TOKENS)]
Label = Annotated[str, Field(max_length=128)]


def text_or_list(value: object) -> str:
    """The tag of a value that is a text or a list; tags begin with a sign that no field has."""
    return "<list>" if isinstance(value, list) else "<text>"


def _refuse(value: object) -> object:
    if value is not None:
        raise PydanticCustomError("unsupported_field", "is not supported here")
    return value


def _default_for_null(value: object) -> object:
    if value is None:
        raise PydanticUseDefault
    return value


Refused = Annotated[Any, AfterValidator(_refuse), Field(description="Refused unless null.")]
Ignored = Annotated[Any, Field(description="Accepted and ignored.")]
# With a default that is not None; null gives that.
Flag = Annotated[bool, BeforeValidator(_default_for_null)]


class ApiRequest(BaseModel):
    """A request body, or a part of one. A field that is not declared is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class IgnoredFields(ApiRequest):
    """What official clients send and nothing here depends on."""

    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    spaces_between_special_tokens: Ignored = None

    @property
    def ignored(self) -> list[str]:
        """The ignored fields that were given, by name."""
        given = self.model_fields_set & IgnoredFields.model_fields.keys()
        return sorted(name for name in given if getattr(self, name) is not None)


class StreamOptions(ApiRequest):
    """`stream_options`. `continuous_usage_stats`: usage so far in every event."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Ignored = None
