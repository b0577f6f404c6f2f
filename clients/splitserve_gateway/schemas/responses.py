"""Request body of `POST /v1/responses`. Stateless: the request has all input of its response."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from splitserve_gateway.schemas.base import (
    IGNORED,
    NULL_IS_DEFAULT,
    ApiRequest,
    Flag,
    FreeObject,
    Id,
    Ignored,
    Int32,
    Label,
    Name,
    Refused,
    at_most,
    described,
    text_or_list,
    text_type,
)
from splitserve_gateway.schemas.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    RefusalPart,
    TemplateVariables,
    ThinkingFields,
    kind_of_part,
)
from splitserve_gateway.schemas.sampling import (
    MAX_TOOLS,
    TEXT_FORMAT,
    AnyResponseTool,
    ResponseTool,
    ResponseToolChoice,
    SamplingFields,
)

_ItemStatus = Annotated[Literal["in_progress", "completed", "incomplete"] | None, IGNORED]


class ResponseTextPart(ApiRequest):
    """Text part of a message. `annotations` and `logprobs`: repeated from an earlier answer."""

    type: Annotated[
        Literal["input_text", "output_text", "text"], text_type("input_text", "output_text", "text")
    ]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None
    prompt_cache_breakpoint: Ignored = None
    cache_control: Ignored = None


Part = Annotated[
    Annotated[ResponseTextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(kind_of_part),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], at_most(MAX_PARTS), Tag("<list>")],
    Discriminator(text_or_list),
]


class Message(ApiRequest):
    """Message of the caller or of an earlier answer."""

    type: Annotated[Literal["message"], NULL_IS_DEFAULT] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Ignored = None
    status: _ItemStatus = None
    phase: Ignored = None
    cache_control: Ignored = None


class CalledFunction(ApiRequest):
    """Tool call of an earlier answer. `arguments`: JSON text."""

    type: Literal["function_call"]
    call_id: Id
    name: Name
    arguments: str
    parsed_arguments: Ignored = None
    id: Ignored = None
    status: _ItemStatus = None
    namespace: Ignored = None
    caller: Ignored = None
    is_async: Annotated[Ignored, Field(alias="async")] = None


class FunctionOutput(ApiRequest):
    """Output of a called tool."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Content
    name: Name | None = None
    id: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None
    status: _ItemStatus = None


class ReasoningText(ApiRequest):
    """Piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class Reasoning(ApiRequest):
    """Reasoning of the model before an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], at_most(MAX_PARTS)] | None = None
    summary: Annotated[list[ReasoningText], at_most(MAX_PARTS)] | None = None
    id: Ignored = None
    status: _ItemStatus = None
    encrypted_content: Refused = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind_of_item(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    # An unknown kind is validated as a message, whose error names the allowed types.
    return f"<{kind if kind in _KINDS else 'message'}>"


Item = Annotated[
    Annotated[Message, Tag("<message>")]
    | Annotated[CalledFunction, Tag("<function_call>")]
    | Annotated[FunctionOutput, Tag("<function_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    Discriminator(_kind_of_item),
]
# Reasoning alone is not an input.
_NO_REASONING = {"not": {"required": ["type"], "properties": {"type": {"const": "reasoning"}}}}
Input = Annotated[
    Annotated[str, Tag("<text>"), described(minLength=1)]
    | Annotated[
        list[Item], at_most(MAX_MESSAGES), Tag("<list>"), described(contains=_NO_REASONING)
    ],
    Discriminator(text_or_list),
]


class TextFields(ApiRequest):
    """Format of the answer's text (`text`)."""

    format: Annotated[FreeObject | None, WithJsonSchema(TEXT_FORMAT)] = None
    verbosity: Ignored = None


class ReasoningFields(ApiRequest):
    """Reasoning effort (`reasoning`), for chat templates that read it."""

    effort: Label | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Refused = None
    mode: Refused = None


class ResponseStreamOptions(ApiRequest):
    """Options of a stream (`stream_options`). The last event always has the usage."""

    include_obfuscation: Ignored = None


_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


# "disabled" is what is done; "auto" would cut the beginning of an input that is too long.
_Truncation = Annotated[
    Literal["auto", "disabled"] | None,
    BeforeValidator(lambda value: None if value == "disabled" else value),
    IGNORED,
]


class ResponsesRequest(ThinkingFields, SamplingFields):
    """Request body of `/v1/responses`: OpenAI's fields, and the sampling fields of chats."""

    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[Int32 | None, described(minimum=1)] = None
    top_logprobs: Annotated[Int32 | None, described(minimum=0, maximum=20)] = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            at_most(16),
        ]
        | None
    ) = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    tools: Annotated[list[AnyResponseTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: Flag = True
    truncation: _Truncation = None
    chat_template_kwargs: TemplateVariables | None = None
    metadata: _Metadata | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]

    background: Annotated[Literal[False] | None, Field(description="Refused if true.")] = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    max_tool_calls: Refused = None
    context_management: Refused = None
    moderation: Refused = None
    image: Refused = None
    background_options: Refused = None
    access_programs: Refused = None
    # Fields of chats that have other names here, or that would produce several answers.
    n: Refused = None
    best_of: Refused = None
    max_tokens: Refused = None
    response_format: Refused = None
    prompt_token_ids: Refused = None
    prompt_logprobs: Refused = None
    echo: Refused = None
    return_token_ids: Refused = None
    return_tokens_as_token_ids: Refused = None

    @property
    def own_tools(self) -> dict[int, ResponseTool]:
        """Tools that the caller runs, by their positions in `tools`."""
        tools = enumerate(self.tools or ())
        return {index: tool for index, tool in tools if isinstance(tool, ResponseTool)}

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text has logprobs."""
        return "message.output_text.logprobs" in (self.include or ())
