"""Request bodies of `/v1/chat/completions`, `/v1/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from splitserve_gateway.schemas.base import (
    EMPTY_IS_NULL,
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
    TokenIds,
    at_most,
    described,
    needs_one_of,
    text_or_list,
    text_type,
)
from splitserve_gateway.schemas.sampling import MAX_TOOLS, ChatTool, ChatToolChoice, SamplingFields

MAX_MESSAGES = 4096
MAX_PARTS = 1024

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class TextPart(ApiRequest):
    """Text part of a message's content. Only text is served."""

    type: Annotated[Literal["text"], text_type("text")]
    text: str
    prompt_cache_breakpoint: Ignored = None
    cache_control: Ignored = None


class RefusalPart(ApiRequest):
    """Refusal in an earlier answer, in place of text."""

    type: Literal["refusal"]
    refusal: str


def kind_of_part(value: object) -> str:
    """Returns the union tag of a content part."""
    kind = value.get("type") if isinstance(value, dict) else None
    return "<refusal>" if kind == "refusal" else "<text>"


ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(kind_of_part),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], at_most(MAX_PARTS), Tag("<list>")],
    Discriminator(text_or_list),
]


def _kind_of_arguments(value: object) -> str:
    return "<object>" if isinstance(value, dict) else "<JSON>"


_Arguments = Annotated[
    Annotated[str, Tag("<JSON>")] | Annotated[FreeObject, Tag("<object>")],
    Discriminator(_kind_of_arguments),
]


class FunctionCall(ApiRequest):
    """Function name and arguments of an earlier tool call. `arguments`: JSON text or an object."""

    name: Name
    arguments: Annotated[_Arguments, NULL_IS_DEFAULT] = ""
    parsed_arguments: Ignored = None


class ToolCall(ApiRequest):
    """Tool call of an earlier answer."""

    id: Id | None = None
    type: Annotated[Literal["function"], NULL_IS_DEFAULT] = "function"
    function: FunctionCall
    index: Ignored = None


class ChatMessage(ApiRequest):
    """Message of a chat. An earlier answer can be sent back unchanged as an assistant message."""

    role: Role
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOLS)] | None = None
    tool_call_id: Id | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    id: Ignored = None
    annotations: Ignored = None
    parsed: Ignored = None
    cache_control: Ignored = None
    reasoning_details: Ignored = None
    provider_specific_fields: Ignored = None
    thinking_blocks: Ignored = None
    audio: Refused = None
    function_call: Refused = None

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"required": ["role"], "properties": {"role": {"const": "assistant"}}},
            "else": needs_one_of("content"),
        }
    )

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            message = f"must be a text or a list of text parts in a message of role {self.role}"
            raise PydanticCustomError("content_missing", message)
        return self


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    if taken := _NO_VARIABLES & variables.keys():
        message = f"{min(taken)} is reserved: templates get it from other fields"
        raise PydanticCustomError("variable_taken", message)
    return variables


_NO_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}
TemplateVariables = Annotated[FreeObject, AfterValidator(_check_variables)]


class ThinkingMode(ApiRequest):
    """Whether the model thinks, in the form of Anthropic. `adaptive`: as the template decides."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None


def _kind_of_thinking(value: object) -> str:
    return "<flag>" if isinstance(value, bool) else "<object>"


class ThinkingFields(ApiRequest):
    """Whether the model thinks, for chat templates that have a variable of either name."""

    enable_thinking: bool | None = None
    thinking: (
        Annotated[
            Annotated[bool, Tag("<flag>")] | Annotated[ThinkingMode, Tag("<object>")],
            Discriminator(_kind_of_thinking),
        ]
        | None
    ) = None

    @property
    def is_thinking(self) -> bool | None:
        """Whether the model is to think; None if the template decides."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(self.thinking, ThinkingMode):
            return {"enabled": True, "disabled": False}.get(self.thinking.type)
        return self.thinking


class ChatFields(ThinkingFields):
    """Fields that chat templates read."""

    messages: Annotated[list[ChatMessage], at_most(MAX_MESSAGES), described(minItems=1)] | None = (
        None
    )
    tools: Annotated[list[ChatTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: Flag = True
    documents: Annotated[list[FreeObject], at_most(1024)] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: Label | None = None
    add_special_tokens: bool | None = None
    chat_template: Refused = None
    mm_processor_kwargs: Refused = None


class ChatRequest(ChatFields, SamplingFields):
    """Request body of `/v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra=needs_one_of("messages", "prompt_token_ids"))

    max_completion_tokens: Annotated[Int32 | None, described(minimum=1)] = None
    logprobs: Flag = False
    top_logprobs: Annotated[Int32 | None, described(minimum=0, maximum=20)] = None

    include_reasoning: Flag = True

    modalities: list[Literal["text"]] | None = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    web_search_options: Refused = None
    moderation: Refused = None


# -- Completions: `POST /v1/completions` -----------------------------------------------------------

MAX_PROMPTS = 1024


def kind_of_prompt(value: object) -> str:
    """Returns the union tag of a text, token ids, or a batch of either."""
    if not isinstance(value, list):
        return "<text>"
    match value:
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<lists>"
        case _:
            return "<tokens>"


_Many = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
_Text = Annotated[str, described(minLength=1)]
_Tokens = Annotated[TokenIds, described(minItems=1)]
_Prompt = Annotated[
    Annotated[_Text, Tag("<text>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Text], _Many, Tag("<texts>")]
    | Annotated[list[_Tokens], _Many, Tag("<lists>")],
    Discriminator(kind_of_prompt),
]


class CompletionRequest(SamplingFields):
    """Request body of `/v1/completions`. `prompt`: a text, its token ids, or a batch of either.

    A model with an encoder reads `prompt` with it, and its decoder begins with `decoder_prompt`: a
    text behind the start token, or token ids; None for what the model's configuration says.
    """

    model_config = ConfigDict(json_schema_extra=needs_one_of("prompt", "prompt_token_ids"))

    prompt: _Prompt | None = None
    decoder_prompt: str | TokenIds | None = None
    logprobs: Annotated[Int32 | None, described(minimum=0, maximum=20)] = None
    suffix: Annotated[Refused, EMPTY_IS_NULL] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Prompts as a list of texts or of token id lists; empty without a prompt."""
        prompt = self.prompt
        if prompt is None:
            return [] if self.prompt_token_ids is None else [self.prompt_token_ids]
        if isinstance(prompt, str):
            return [prompt]
        is_batch = bool(prompt) and isinstance(prompt[0], str | list)
        return cast(list[str] | list[list[int]], prompt if is_batch else [prompt])


# -- Tokenization: `POST /tokenize` and `POST /detokenize` -----------------------------------------


class TokenizeRequest(ChatFields):
    """Request body of `/tokenize`: `prompt`, or `messages` with other fields of chat templates."""

    model_config = ConfigDict(json_schema_extra=needs_one_of("prompt", "messages"))

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False


class DetokenizeRequest(ApiRequest):
    """Request body of `/detokenize`."""

    model: Name | None = None
    tokens: TokenIds
    skip_special_tokens: Flag = False
