"""A request of the Responses API as the chat that it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from splitserve_gateway.schemas.chat import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    RefusalPart,
    ToolCall,
)
from splitserve_gateway.schemas.responses import (
    CalledFunction,
    Content,
    FunctionOutput,
    Item,
    Message,
    Reasoning,
    ResponsesRequest,
)
from splitserve_gateway.schemas.sampling import SamplingFields
from splitserve_gateway.schemas.tools import (
    AllowedChatChoice,
    AllowedChatTools,
    ChatTool,
    ChatToolChoice,
    ChatToolName,
    FunctionDefinition,
    NamedFunction,
    ResponseTool,
    ResponseToolChoice,
    ResponseToolName,
)

_SAMPLING = SamplingFields.model_fields.keys() - {
    "n", "best_of", "max_tokens", "response_format", "prompt_token_ids", "prompt_logprobs",
    "stream_options", "echo", "return_token_ids", "return_tokens_as_token_ids",
}  # fmt: skip


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The same as a chat. What is to be judged by a chat's rules, as tools are, is judged there."""
    shared = {name: getattr(body, name) for name in _SAMPLING}
    return ChatRequest.model_construct(
        **shared,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        tools=list(map(_tool, body.tools or ())),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages = []
    if body.instructions is not None:
        messages.append(ChatMessage.model_construct(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(ChatMessage.model_construct(role="user", content=body.input))
        return messages
    return messages + _chat_of(body.input)


def _chat_of(items: Sequence[Item]) -> list[ChatMessage]:
    """Items of one answer, which are several here, become one message of the assistant."""
    messages: list[ChatMessage] = []
    answer = _Answer()
    for item in items:
        match item:
            case Reasoning():
                answer.reasoning += [piece.text for piece in item.content or item.summary or ()]
            case CalledFunction():
                called = FunctionCall.model_construct(name=item.name, arguments=item.arguments)
                answer.calls.append(ToolCall.model_construct(id=item.call_id, function=called))
            case Message(role="assistant"):
                answer.texts.append(_text(item.content))
            case Message() | FunctionOutput():
                messages += answer.take()
                messages.append(_other(item))
            case _:
                assert_never(item)
    return messages + answer.take()


@dataclass(slots=True)
class _Answer:
    """The items of one answer."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def take(self) -> list[ChatMessage]:
        """The message that they are, if there are any; forgets them."""
        if not (self.reasoning or self.texts or self.calls):
            return []
        message = ChatMessage.model_construct(
            role="assistant",
            reasoning_content="".join(self.reasoning) or None,
            content="".join(self.texts) if self.texts else None,
            tool_calls=self.calls or None,
        )
        self.reasoning, self.texts, self.calls = [], [], []
        return [message]


def _other(item: Message | FunctionOutput) -> ChatMessage:
    if isinstance(item, FunctionOutput):
        return ChatMessage.model_construct(
            role="tool", tool_call_id=item.call_id, name=item.name, content=_text(item.output)
        )
    return ChatMessage.model_construct(role=item.role, content=_text(item.content))


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _tool(tool: ResponseTool) -> ChatTool:
    given = {name: getattr(tool, name) for name in FunctionDefinition.model_fields}
    return ChatTool(type="function", function=FunctionDefinition.model_construct(**given))


def _tool_choice(choice: ResponseToolChoice | None) -> ChatToolChoice | None:
    if choice is None or isinstance(choice, str):
        return choice
    if isinstance(choice, ResponseToolName):
        return _tool_name(choice)
    allowed = AllowedChatTools(mode=choice.mode, tools=list(map(_tool_name, choice.tools)))
    return AllowedChatChoice(type="allowed_tools", allowed_tools=allowed)


def _tool_name(tool: ResponseToolName) -> ChatToolName:
    return ChatToolName(type="function", function=NamedFunction(name=tool.name))


def _response_format(body: ResponsesRequest) -> object:
    text_format = body.text.format if body.text else None
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    rest = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": rest}
