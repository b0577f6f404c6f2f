"""Request bodies of Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from splitserve_contract import PARAMETERS
from splitserve_gateway.schemas.base import (
    ApiRequest,
    Flag,
    FreeObject,
    Id,
    Ignored,
    Int32,
    Int64,
    Label,
    Name,
    Refused,
    SchedulingFields,
    at_most,
    described,
    text_or_list,
)
from splitserve_gateway.schemas.chat import MAX_MESSAGES, MAX_PARTS, TemplateVariables
from splitserve_gateway.schemas.sampling import MAX_STOP_CHARS, MAX_STOPS, NewName

# Coding agents with several tool servers send more than OpenAI's 128.
MAX_MESSAGE_TOOLS = 512


def _one_of(allowed: str, *values: object, note: str = "") -> BeforeValidator:
    """Validates a value that names a kind. `allowed`: the values in words, for the error."""

    def check(value: object) -> object:
        if value not in values:
            raise PydanticCustomError("kind_not_served", f"must be {allowed}{note}")
        return value

    return BeforeValidator(check)


def _refuse(value: object) -> object:
    if value not in (None, []):
        raise PydanticCustomError("unsupported_field", "is not supported; allowed: an empty list")
    return value


_Nothing = Annotated[
    Any,
    AfterValidator(_refuse),
    WithJsonSchema(
        {"type": ["array", "null"], "maxItems": 0, "description": "Refused unless empty."}
    ),
]
_NOTE = ": images, documents and what Anthropic's servers run are not served"


# -- Content blocks --------------------------------------------------------------------------------


class MessageText(ApiRequest):
    """Block of text."""

    type: Annotated[Literal["text"], _one_of("'text'", "text", note=_NOTE)]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class _UserText(MessageText):
    type: Annotated[
        Literal["text"], _one_of("'text' or 'tool_result'", "text", "tool_result", note=_NOTE)
    ]


class _AssistantText(MessageText):
    type: Annotated[
        Literal["text"],
        _one_of("'text', 'thinking', 'redacted_thinking' or 'tool_use'", "text", note=_NOTE),
    ]


class ThinkingBlock(ApiRequest):
    """Reasoning of an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None
    cache_control: Ignored = None


class RedactedThinking(ApiRequest):
    """Reasoning that only Anthropic's servers can read; dropped."""

    type: Literal["redacted_thinking"]
    data: Ignored = None
    cache_control: Ignored = None


class ToolUseBlock(ApiRequest):
    """Tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Id
    name: Name
    input: FreeObject
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Refused = None


_Texts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[MessageText], at_most(MAX_PARTS), Tag("<list>")],
    Discriminator(text_or_list),
]


class ToolResultBlock(ApiRequest):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: _Texts | None = None
    is_error: bool | None = None
    cache_control: Ignored = None
    toolset_name: Refused = None


def _kind_of_block(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    # An unknown kind is validated as a text, whose error names the allowed types.
    return f"<{kind if kind in _KINDS else 'text'}>"


_KINDS = ("thinking", "redacted_thinking", "tool_use", "tool_result")


def _kind_of_user_block(value: object) -> str:
    kind = _kind_of_block(value)
    return kind if kind == "<tool_result>" else "<text>"


def _kind_of_assistant_block(value: object) -> str:
    kind = _kind_of_block(value)
    return kind if kind != "<tool_result>" else "<text>"


_UserBlock = Annotated[
    Annotated[_UserText, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_kind_of_user_block),
]
_AssistantBlock = Annotated[
    Annotated[_AssistantText, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinking, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    Discriminator(_kind_of_assistant_block),
]


# -- Messages --------------------------------------------------------------------------------------


class UserMessage(ApiRequest):
    """Message of the user, with the results of tool calls."""

    role: Annotated[Literal["user"], _one_of("'user', 'assistant' or 'system'", "user")]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[_UserBlock], at_most(MAX_PARTS), Tag("<list>")],
        Discriminator(text_or_list),
    ]


class AssistantMessage(ApiRequest):
    """Earlier answer. At the end of a request: the beginning of the answer."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[_AssistantBlock], at_most(MAX_PARTS), Tag("<list>")],
        Discriminator(text_or_list),
    ]


class SystemMessage(ApiRequest):
    """Instruction between the turns, for templates that allow it."""

    role: Literal["system"]
    content: _Texts


def _role_of(value: object) -> str:
    role = value.get("role") if isinstance(value, dict) else None
    # An unknown role is validated as the user's, whose error names the allowed roles.
    return f"<{role if role in ('assistant', 'system') else 'user'}>"


Turn = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    Discriminator(_role_of),
]


# -- Tools -----------------------------------------------------------------------------------------


class MessageTool(ApiRequest):
    """Function that the model may call. `input_schema`: a JSON Schema."""

    type: Annotated[
        Literal["custom"] | None,
        _one_of("'custom'", "custom", None, note=": tools of Anthropic are not served"),
    ] = None
    name: NewName
    description: str | None = None
    input_schema: FreeObject
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    allowed_callers: Annotated[list[Literal["direct"]], at_most(8)] | None = None
    defer_loading: Annotated[Literal[False] | None, Field(description="Refused if true.")] = None


class MessageToolChoice(ApiRequest):
    """Whether tools have to be called. `name`: the tool, with the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: Flag = False


# -- Requests --------------------------------------------------------------------------------------


class Thinking(ApiRequest):
    """Reasoning (`thinking`), for chat templates that can switch it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputSchema(ApiRequest):
    """Form of the answer's text: JSON that is valid for a JSON Schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[FreeObject, Field(alias="schema")]


class OutputConfig(ApiRequest):
    """Form of the answer's text, and effort for chat templates that read it."""

    format: OutputSchema | None = None
    effort: Label | None = None
    task_budget: Ignored = None


_Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_BOUNDS = {each.api_name: described(**each.json_schema) for each in PARAMETERS}


class MessageFields(SchedulingFields):
    """Fields that requests for messages and for token counts share."""

    messages: Annotated[list[Turn], at_most(MAX_MESSAGES), described(minItems=1)]
    system: _Texts | None = None
    tools: Annotated[list[MessageTool], at_most(MAX_MESSAGE_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None

    stream: Flag = False
    stop_sequences: Annotated[list[_Stop], at_most(MAX_STOPS)] | None = None
    temperature: Annotated[float | None, _BOUNDS["temperature"]] = None
    top_p: Annotated[float | None, _BOUNDS["top_p"]] = None
    top_k: Annotated[Int32 | None, _BOUNDS["top_k"]] = None
    seed: Int64 | None = None
    chat_template_kwargs: TemplateVariables | None = None

    cache_control: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    inference_geo: Ignored = None
    betas: Ignored = None
    context_management: Ignored = None
    compaction: Ignored = None
    diagnostics: Ignored = None
    billing_policy: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    fallbacks: Ignored = None
    fallback_credit_token: Ignored = None

    container: Refused = None
    thread: Refused = None
    mcp_servers: _Nothing = None


class MessagesRequest(MessageFields):
    """Request body of `/v1/messages`: Anthropic's fields, and scheduling fields of chats."""

    max_tokens: Annotated[Int32, described(minimum=1)]


class CountTokensRequest(MessageFields):
    """Request body of `/v1/messages/count_tokens`; fields that shape no prompt have no effect."""

    max_tokens: Ignored = None
