"""Tools, and which of them may be called: in the form of chats, and of responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from splitserve_gateway.schemas.base import (
    ApiRequest,
    FreeObject,
    Ignored,
    Name,
    Refused,
    at_most,
    described,
)

MAX_TOOLS = 128

_Mode = Literal["auto", "required"]
_NewName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$", examples=["get_weather"])]
_Word = Literal["none", "auto", "required"]


class FunctionDefinition(ApiRequest):
    """A function that the model may call. `parameters`: a JSON Schema."""

    name: _NewName
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class NamedFunction(ApiRequest):
    """A function of `tools`."""

    name: Annotated[Name, described(minLength=1)]


def _kind_of_choice(value: object) -> str:
    kind = value.get("type", "") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None:
        return "<word>"
    return "<allowed>" if kind == "allowed_tools" else "<function>"


# -- chats -----------------------------------------------------------------------------------------


class ChatTool(ApiRequest):
    """A tool; those that a server would run are none of ours."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatToolName(ApiRequest):
    """One of the tools."""

    type: Literal["function"]
    function: NamedFunction


class AllowedChatTools(ApiRequest):
    """The tools that may be called, or one of which has to be."""

    mode: _Mode
    tools: Annotated[list[ChatToolName], Field(min_length=1), at_most(MAX_TOOLS)]


class AllowedChatChoice(ApiRequest):
    """A choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedChatTools


ChatToolChoice = Annotated[
    Annotated[_Word, Tag("<word>")]
    | Annotated[ChatToolName, Tag("<function>")]
    | Annotated[AllowedChatChoice, Tag("<allowed>")],
    Discriminator(_kind_of_choice),
]


# -- responses -------------------------------------------------------------------------------------


class ResponseTool(ApiRequest):
    """A tool, which is a function; those that a server would run are none of ours."""

    type: Literal["function"]
    name: _NewName
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None
    output_schema: Ignored = None
    allowed_callers: Refused = None
    defer_loading: Annotated[Literal[False] | None, Field(description="Refused if true.")] = None
    is_async: Annotated[
        Literal[False] | None, Field(alias="async", description="Refused if true.")
    ] = None


class ResponseToolName(ApiRequest):
    """One of the tools."""

    type: Literal["function"]
    name: Annotated[Name, described(minLength=1)]


class AllowedResponseTools(ApiRequest):
    """A choice of some of the tools, which may be called, or one of which has to be."""

    type: Literal["allowed_tools"]
    mode: _Mode
    tools: Annotated[list[ResponseToolName], Field(min_length=1), at_most(MAX_TOOLS)]


ResponseToolChoice = Annotated[
    Annotated[_Word, Tag("<word>")]
    | Annotated[ResponseToolName, Tag("<function>")]
    | Annotated[AllowedResponseTools, Tag("<allowed>")],
    Discriminator(_kind_of_choice),
]
