"""Sampling fields of completions and chats, their tools, and JSON Schemas of grammar fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag, WithJsonSchema, create_model

from splitserve_contract import PARAMETERS
from splitserve_gateway.schemas.base import (
    ApiRequest,
    Flag,
    FreeJson,
    FreeObject,
    Ignored,
    IgnoredFields,
    Int32,
    Int64,
    Name,
    Refused,
    SchedulingFields,
    StreamOptions,
    TokenId,
    TokenIds,
    at_most,
    described,
    text_or_list,
)

# -- JSON Schemas of grammar fields, for the OpenAPI description -----------------------------------

Json = dict[str, Any]

_NULL: Json = {"type": "null"}
_TEXT: Json = {"type": "string", "minLength": 1}


def _closed(properties: Json, *required: str) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


_PLAIN_FORMAT = _closed({"type": {"enum": ["text", "json_object"]}}, "type")
_JSON_SCHEMA: Json = {
    "name": {"type": ["string", "null"]},
    "description": {"type": ["string", "null"]},
    "schema": {"type": ["object", "null"]},
    "strict": {"type": ["boolean", "null"]},
}
_KIND: Json = {"const": "json_schema"}

RESPONSE_FORMAT: Json = {
    "anyOf": [
        _PLAIN_FORMAT,
        _closed({"type": _KIND, "json_schema": _closed(_JSON_SCHEMA)}, "type", "json_schema"),
        _NULL,
    ]
}
TEXT_FORMAT: Json = {
    "anyOf": [_PLAIN_FORMAT, _closed({"type": _KIND, **_JSON_SCHEMA}, "type"), _NULL]
}
GUIDED: dict[str, Json] = {
    "json": _or_null({"type": "object"}),
    "regex": _or_null({**_TEXT, "description": "A regular expression."}),
    "choice": _or_null({"type": "array", "minItems": 1, "maxItems": 1024, "items": _TEXT}),
    "grammar": _or_null(
        {**_TEXT, "description": "In Lark or GBNF.", "examples": ['start: "yes" | "no"']}
    ),
}
STRUCTURED_OUTPUTS: Json = _or_null(
    {**_closed({**GUIDED, "json_object": {"type": ["boolean", "null"]}}), "maxProperties": 1}
)


# -- Tools and tool choices ------------------------------------------------------------------------

MAX_TOOLS = 128

_Mode = Literal["auto", "required"]
NewName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$", examples=["get_weather"])]
_Word = Literal["none", "auto", "required"]


class FunctionDefinition(ApiRequest):
    """Function that the model may call. `parameters`: a JSON Schema."""

    name: NewName
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None
    cache_control: Ignored = None


class NamedFunction(ApiRequest):
    """Reference to a function of `tools` by name."""

    name: Annotated[Name, described(minLength=1)]


def _kind_of_choice(value: object) -> str:
    kind = value.get("type", "") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None:
        return "<word>"
    return "<allowed>" if kind == "allowed_tools" else "<function>"


# -- Tools in the form of chats --------------------------------------------------------------------


class ChatTool(ApiRequest):
    """Function tool of a chat. Tools that a server would run are not supported."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Ignored = None


class ChatToolName(ApiRequest):
    """Reference to one of the tools."""

    type: Literal["function"]
    function: NamedFunction


class AllowedChatTools(ApiRequest):
    """Tools that may be called (`auto`), or of which one has to be called (`required`)."""

    mode: _Mode
    tools: Annotated[list[ChatToolName], Field(min_length=1), at_most(MAX_TOOLS)]


class AllowedChatChoice(ApiRequest):
    """Restriction of calls to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedChatTools


ChatToolChoice = Annotated[
    Annotated[_Word, Tag("<word>")]
    | Annotated[ChatToolName, Tag("<function>")]
    | Annotated[AllowedChatChoice, Tag("<allowed>")],
    Discriminator(_kind_of_choice),
]


# -- Tools in the form of the Responses API --------------------------------------------------------


class ResponseTool(ApiRequest):
    """Function tool of a response. Tools that a server would run are not supported."""

    type: Literal["function"]
    name: NewName
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    output_schema: Ignored = None
    allowed_callers: Refused = None
    defer_loading: Annotated[Literal[False] | None, Field(description="Refused if true.")] = None
    is_async: Annotated[
        Literal[False] | None, Field(alias="async", description="Refused if true.")
    ] = None


class HostedTool(ApiRequest):
    """Tool that OpenAI's server runs. Agents offer it unasked: the model is not told of it."""

    model_config = ConfigDict(extra="ignore")

    type: Literal[
        "web_search", "web_search_preview", "image_generation", "tool_search", "namespace"
    ]


def _kind_of_tool(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<hosted>" if kind in get_args(HostedTool.model_fields["type"].annotation) else "<own>"


AnyResponseTool = Annotated[
    Annotated[ResponseTool, Tag("<own>")] | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_kind_of_tool),
]


class ResponseToolName(ApiRequest):
    """Reference to one of the tools."""

    type: Literal["function"]
    name: Annotated[Name, described(minLength=1)]


class AllowedResponseTools(ApiRequest):
    """Tools that may be called (`auto`), or of which one has to be called (`required`)."""

    type: Literal["allowed_tools"]
    mode: _Mode
    tools: Annotated[list[ResponseToolName], Field(min_length=1), at_most(MAX_TOOLS)]


ResponseToolChoice = Annotated[
    Annotated[_Word, Tag("<word>")]
    | Annotated[ResponseToolName, Tag("<function>")]
    | Annotated[AllowedResponseTools, Tag("<allowed>")],
    Discriminator(_kind_of_choice),
]


# -- Sampling --------------------------------------------------------------------------------------

# Read by `requested_grammar`; at most one of these fields may ask for a grammar.
GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 1024

_Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_Stops = Annotated[
    Annotated[_Stop, Tag("<text>")] | Annotated[list[_Stop], at_most(MAX_STOPS), Tag("<list>")],
    Discriminator(text_or_list),
]
_BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]


def _fields_of_numbers() -> dict[str, Any]:
    """Returns the fields of all numeric parameters; each is a number, null or absent."""
    fields: dict[str, Any] = {}
    for parameter in PARAMETERS:
        whole = Int64 if parameter.num_bits == 64 else Int32
        kind: Any = float if parameter.kind is float else whole
        if parameter.api_name:
            bounds = described(**parameter.json_schema) if parameter.json_schema else None
            fields[parameter.api_name] = Annotated[kind | None, bounds], None
    return fields


if TYPE_CHECKING:

    class NumberFields(IgnoredFields):
        """Fields of numeric parameters, as far as they are read by name."""

        max_tokens: int | None = None
        n: int | None = None
        length_penalty: float | None = None
        prompt_logprobs: int | None = None
else:
    NumberFields = create_model(
        "NumberFields", __base__=IgnoredFields, __module__=__name__, **_fields_of_numbers()
    )


class SamplingFields(NumberFields, SchedulingFields):
    """Sampling and scheduling fields of completions and chats. The scheduler checks ranges."""

    stream: Flag = False
    stream_options: StreamOptions | None = None

    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, described(minimum=-100, maximum=100)]],
            Field(max_length=1024),
            described(propertyNames={"pattern": "^[0-9]{1,9}$"}),
        ]
        | None
    ) = None
    use_beam_search: Flag = False
    early_stopping: bool | None = None

    stop: _Stops | None = None
    stop_token_ids: Annotated[list[TokenId], at_most(256)] | None = None
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    bad_words: Annotated[list[_BadWord], at_most(MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], at_most(16384), described(minItems=1)] | None = None
    skip_special_tokens: Flag = True

    prompt_token_ids: Annotated[TokenIds | None, described(minItems=1)] = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Int32, Field(ge=-1)] | None = None
    echo: Flag = False
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False

    response_format: Annotated[FreeJson, WithJsonSchema(RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[FreeJson, WithJsonSchema(STRUCTURED_OUTPUTS)] = None
    guided_json: Annotated[FreeJson, WithJsonSchema(GUIDED["json"])] = None
    guided_regex: Annotated[FreeJson, WithJsonSchema(GUIDED["regex"])] = None
    guided_choice: Annotated[FreeJson, WithJsonSchema(GUIDED["choice"])] = None
    guided_grammar: Annotated[FreeJson, WithJsonSchema(GUIDED["grammar"])] = None
    logits_processors: Refused = None
    kv_transfer_params: Refused = None
    vllm_xargs: Refused = None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
