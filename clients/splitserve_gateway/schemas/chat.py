"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from splitserve_gateway.schemas.base import ApiRequest, Flag, Ignored, Int32, Refused
from splitserve_gateway.schemas.sampling import SamplingFields

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(ApiRequest):
    """A part of a message's content; only text is served."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(ApiRequest):
    """The call of a tool that an earlier answer made. `arguments`: JSON text."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(ApiRequest):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None


class ChatMessage(ApiRequest):
    """One message. Of an assistant's message an answer can be sent back as it came."""

    role: Role
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Ignored = None
    audio: Refused = None
    function_call: Refused = None


class ToolFunction(ApiRequest):
    """What a tool is called, what it does, and the JSON schema of its arguments."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiRequest):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class ToolName(ApiRequest):
    """The name within a tool choice."""

    name: str


class NamedToolChoice(ApiRequest):
    """The one tool to call."""

    type: Literal["function"]
    function: ToolName


class ChatRequest(SamplingFields):
    """What `/v1/chat/completions` takes."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: Flag = False
    top_logprobs: Int32 | None = None

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: Flag = True

    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    reasoning_effort: str | None = None
    include_reasoning: Flag = True
    modalities: list[Literal["text"]] | None = None

    chat_template: Refused = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None
    mm_processor_kwargs: Refused = None
