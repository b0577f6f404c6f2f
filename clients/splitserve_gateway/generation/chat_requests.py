"""Generation of chats: tools, grammar and prompt of a chat; Responses API bodies as chats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import assert_never

from splitserve_gateway.generation.choices import FieldNames, TextRequest
from splitserve_gateway.generation.prompts import (
    EncodedPrompt,
    Serving,
    chat_of_tokens,
    content_of,
    encode_chat,
    tokenizer_of,
    truncated,
)
from splitserve_gateway.generation.text_requests import text_request
from splitserve_gateway.grammars import (
    AnswerPlan,
    AnswerRules,
    GrammarCheckUnavailable,
    GrammarRefused,
    RequestedGrammar,
    ToolUse,
    plan_answer,
    requested_grammar,
    tool_use,
)
from splitserve_gateway.http import ApiError, invalid
from splitserve_gateway.schemas import (
    GRAMMAR_FIELDS,
    AllowedChatChoice,
    AllowedChatTools,
    CalledFunction,
    ChatFields,
    ChatMessage,
    ChatRequest,
    ChatTool,
    ChatToolChoice,
    ChatToolName,
    Content,
    FunctionCall,
    FunctionDefinition,
    FunctionOutput,
    HostedTool,
    Item,
    Message,
    NamedFunction,
    Reasoning,
    RefusalPart,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    ResponseToolName,
    SamplingFields,
    ToolCall,
)
from splitserve_gateway.upstreams import ServedByScheduler
from splitserve_text import (
    OutputFormat,
    ReasoningState,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """Text request of a chat, and the plan of its answer.

    `final_message`: text that the answer continues (`continue_final_message`); otherwise empty.
    """

    request: TextRequest
    plan: AnswerPlan
    final_message: str = ""


async def chat_generation(
    serving: Serving, body: ChatRequest, params: SamplingParams, fields: FieldNames
) -> ChatGeneration:
    """Returns the generation of chat `body`. `fields`: the caller's names of fields, for errors.

    Raises ApiError and SplitserveError.
    """
    use = await tools_of(body)
    prompt = await _prompt(body, serving.served, use.template_tools)
    plan = await answer_plan(serving, body, use, prompt.text)
    body.add_ignored(plan.ignored)
    params = replace(params, grammar=plan.grammar)
    request = await text_request(serving, body, params, [prompt], fields)
    skips = body.skip_special_tokens and not plan.shows_markers
    rules = replace(request.rules, skip_special_tokens=skips)
    return ChatGeneration(replace(request, rules=rules), plan, _final_message(body))


async def _prompt(
    body: ChatRequest, served: ServedByScheduler, tools: list[Mapping[str, object]] | None
) -> EncodedPrompt:
    if body.prompt_token_ids is None or served.model.encoder is not None:
        return await encode_chat(body, served, tools, body.truncate_prompt_tokens)
    token_ids = truncated(body.prompt_token_ids, body.truncate_prompt_tokens, served)
    return chat_of_tokens(token_ids, tokenizer_of(served))


def _final_message(body: ChatRequest) -> str:
    if not body.continue_final_message or not body.messages:
        return ""
    content = content_of(body.messages[-1])
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# -- Conversion of Responses API requests to chats -------------------------------------------------

_SAMPLING = SamplingFields.model_fields.keys() - {
    "n", "best_of", "max_tokens", "response_format", "prompt_token_ids", "prompt_logprobs",
    "stream_options", "echo", "return_token_ids", "return_tokens_as_token_ids",
}  # fmt: skip


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Converts a Responses API body to a chat request.

    Fields of `body` are already validated. Rules of chats, such as those of tools, are checked when
    the chat is generated.
    """
    shared = {name: getattr(body, name) for name in _SAMPLING}
    hosted = [tool for tool in body.tools or () if isinstance(tool, HostedTool)]
    body.add_ignored([f"tools.{tool.type}" for tool in hosted])
    return ChatRequest.model_construct(
        **shared,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        tools=list(map(_tool, body.own_tools.values())),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        enable_thinking=body.enable_thinking,
        thinking=body.thinking,
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
    """Converts input items to messages. Merges consecutive items of an answer into one message."""
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
    """Items of one assistant answer, collected until a message of another role follows."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def take(self) -> list[ChatMessage]:
        """Returns the items as one assistant message and clears them; empty list without items."""
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
    names = ("name", "description", "parameters", "strict")
    fields = {name: getattr(tool, name) for name in names}
    return ChatTool(type="function", function=FunctionDefinition.model_construct(**fields))


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


# -- Answer plans and grammars of chats ------------------------------------------------------------

_RETRY_AFTER_S = 1.0


async def tools_of(body: ChatFields) -> ToolUse:
    """Returns the tools of chat `body` and how they may be called. Raises ApiError."""
    if body.tools is None and body.tool_choice is None:
        return ToolUse()
    try:
        return await asyncio.to_thread(
            tool_use, body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls
        )
    except GrammarRefused as error:
        raise invalid(str(error), error.field, "invalid_value") from error


async def answer_plan(
    serving: Serving, body: ChatRequest, use: ToolUse, prompt_end: str
) -> AnswerPlan:
    """Returns the grammar and the parser options of the answer to `body`.

    `prompt_end`: the end of the rendered prompt, which shows whether reasoning is open. Raises
    ApiError.
    """
    config, tokenizer = serving.config, serving.tokenizer
    output_format = OutputFormat.of(
        tokenizer.chat_template_text,
        config.tool_call_parser,
        config.reasoning_parser,
        tokenizer.described_format,
    )
    marks = output_format.reasoning
    state = ReasoningState.NOT_BEGUN if marks is None else marks.state_after(prompt_end)
    special_tokens = frozenset(tokenizer.special_tokens)
    with _refusals():
        requested = await _requested(body)
        rules = AnswerRules(output_format, requested, use, state, special_tokens)
        plan = await plan_answer(serving.checker_for(body.user), rules)
    if not body.skip_special_tokens:  # the caller asks for special tokens
        plan = replace(plan, options=replace(plan.options, hidden=frozenset()))
    return plan


async def completion_plan(serving: Serving, body: SamplingFields) -> AnswerPlan:
    """Returns the plan of an answer without tools and reasoning to `body`. Raises ApiError."""
    checker = serving.checker_for(body.user)
    with _refusals():
        plan = await plan_answer(
            checker, AnswerRules(OutputFormat(None, None), await _requested(body))
        )
    body.add_ignored(plan.ignored)
    return plan


async def _requested(body: SamplingFields) -> RequestedGrammar | None:
    fields: Mapping[str, object] = {name: getattr(body, name) for name in GRAMMAR_FIELDS}
    if all(value is None for value in fields.values()):
        return None
    return await asyncio.to_thread(requested_grammar, fields)


@contextmanager
def _refusals() -> Iterator[None]:
    """Converts exceptions of grammar checks to ApiError: 400 for a refusal, 503 if unavailable."""
    try:
        yield
    except GrammarRefused as error:
        raise invalid(str(error), error.field, "invalid_grammar") from error
    except GrammarCheckUnavailable as error:
        raise ApiError(
            503,
            "service_unavailable_error",
            str(error),
            code="grammar_check_unavailable",
            retry_after_s=_RETRY_AFTER_S,
        ) from error
