"""Messages API bodies (Anthropic's) as chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from splitserve_gateway.generation.choices import CHAT_FIELDS, FieldNames
from splitserve_gateway.http import invalid
from splitserve_gateway.schemas import (
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    ChatTool,
    ChatToolChoice,
    ChatToolName,
    FunctionCall,
    FunctionDefinition,
    MessageFields,
    MessageText,
    MessageTool,
    MessageToolChoice,
    NamedFunction,
    RedactedThinking,
    SchedulingFields,
    SystemMessage,
    ThinkingBlock,
    ToolCall,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserMessage,
)

MESSAGE_FIELDS: FieldNames = {
    **CHAT_FIELDS,
    "stop": "stop_sequences",
    "grammar": "tools",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tools.*.function.parameters": "tools.*.input_schema",
    "tools.*.function": "tools.*",
    "tool_choice.function": "tool_choice",
}
# Claude Code puts a text before its system prompt that differs in every request. No cached prefix
# would be found behind it.
_BILLING = "x-anthropic-billing-header:"
_SAME = (*SchedulingFields.model_fields, "temperature", "top_p", "top_k", "seed", "stream")
_IS_THINKING = {"enabled": True, "disabled": False}
# Efforts that templates do not know, and the nearest that they know.
_EFFORTS = {"xhigh": "high", "max": "high"}
_CHOICES: Mapping[str, ChatToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def message_fields(body: MessageFields) -> FieldNames:
    """Returns the Messages API field names for `body`."""
    if _format(body) is None:
        return MESSAGE_FIELDS
    name = "output_config.format" if body.output_format is None else "output_format"
    named = dict.fromkeys(("grammar", "response_format.json_schema", "response_format"), name)
    return {**MESSAGE_FIELDS, **named}


def chat_of_messages(body: MessageFields, max_tokens: int | None) -> ChatRequest:
    """Converts a Messages API body to a chat request.

    Fields of `body` are already validated. Rules of chats, such as those of tools, are checked when
    the chat is generated. Raises ApiError.
    """
    messages = _messages(body)
    last = messages[-1] if messages else None
    choice = body.tool_choice
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in _SAME},
        messages=messages,
        max_tokens=max_tokens,
        stop=body.stop_sequences,
        tools=None if body.tools is None else list(map(_tool, body.tools)),
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        response_format=_format(body),
        reasoning_effort=_effort(body),
        enable_thinking=None if body.thinking is None else _IS_THINKING.get(body.thinking.type),
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=last is not None
        and last.role == "assistant"
        and bool(last.content)
        and not last.tool_calls,
    )


def _effort(body: MessageFields) -> str | None:
    effort = None if body.output_config is None else body.output_config.effort
    return None if effort is None else _EFFORTS.get(effort, effort)


def _format(body: MessageFields) -> object:
    wanted = body.output_config.format if body.output_config else None
    wanted = body.output_format or wanted
    if wanted is None:
        return None
    schema = {"name": "output", "schema": wanted.json_schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


# -- Tools -----------------------------------------------------------------------------------------


def _tool(tool: MessageTool) -> ChatTool:
    function = FunctionDefinition.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return ChatTool.model_construct(type="function", function=function)


def _tool_choice(choice: MessageToolChoice) -> ChatToolChoice:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        message = "tool_choice.name is required with tool_choice.type 'tool'"
        raise invalid(message, "tool_choice.name", "missing_field")
    return ChatToolName(type="function", function=NamedFunction(name=choice.name))


# -- Messages --------------------------------------------------------------------------------------


def _messages(body: MessageFields) -> list[ChatMessage]:
    messages = []
    if system := _system_text(body.system or ""):
        messages.append(ChatMessage.model_construct(role="system", content=system))
    chat = _Chat()
    for turn in body.messages:
        chat.add(turn)
    return messages + chat.end()


def _system_text(system: str | Sequence[MessageText]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system if not block.text.startswith(_BILLING))


def _text(content: str | Sequence[MessageText]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


@dataclass(slots=True)
class _Chat:
    """Messages of a chat, from turns. Consecutive turns of one role become one message."""

    messages: list[ChatMessage] = field(default_factory=list)
    user: list[str] = field(default_factory=list)
    answer: list[AssistantMessage] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        """Adds a turn. Of a user's turn, results of tools come first, as templates expect."""
        match turn:
            case AssistantMessage():
                self._end_user()
                self.answer.append(turn)
            case SystemMessage():
                self._end_user()
                self._end_answer()
                self._append("system", _text(turn.content))
            case UserMessage():
                self._end_answer()
                self._add_user(turn.content)
            case _:
                assert_never(turn)

    def end(self) -> list[ChatMessage]:
        """Returns all messages."""
        self._end_user()
        self._end_answer()
        return self.messages

    def _append(self, role: str, content: str, **fields: object) -> None:
        message = ChatMessage.model_construct(None, role=role, content=content, **fields)
        self.messages.append(message)

    def _add_user(self, content: str | Sequence[MessageText | ToolResultBlock]) -> None:
        if isinstance(content, str):
            self.user.append(content)
            return
        results = [block for block in content if isinstance(block, ToolResultBlock)]
        if results:
            self._end_user()
        for result in results:
            self._add_result(result)
        texts = [block.text for block in content if isinstance(block, MessageText)]
        self.user += texts or ([] if results else [""])

    def _add_result(self, result: ToolResultBlock) -> None:
        text = _text(result.content or "")
        if not text and result.is_error:
            text = "error"
        self._append("tool", text, tool_call_id=result.tool_use_id)

    def _end_user(self) -> None:
        if self.user:
            self._append("user", "\n".join(self.user))
            self.user = []

    def _end_answer(self) -> None:
        if not self.answer:
            return
        thoughts, texts, calls = [], [], []
        for block in _blocks(self.answer):
            match block:
                case str():
                    texts.append(block)
                case MessageText():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    calls.append(_call(block))
                case RedactedThinking():
                    pass
                case _:
                    assert_never(block)
        self.answer = []
        message = ChatMessage.model_construct(
            role="assistant",
            reasoning_content="".join(thoughts) or None,
            content="".join(texts) if texts or not calls else None,
            tool_calls=calls or None,
        )
        self.messages.append(message)


def _blocks(
    turns: Sequence[AssistantMessage],
) -> Iterator[str | MessageText | ThinkingBlock | RedactedThinking | ToolUseBlock]:
    for turn in turns:
        if isinstance(turn.content, str):
            yield turn.content
        else:
            yield from turn.content


def _call(block: ToolUseBlock) -> ToolCall:
    function = FunctionCall.model_construct(name=block.name, arguments=block.input)
    return ToolCall.model_construct(id=block.id, function=function)
