"""Messages as the model's own template renders them, and what an answer to them looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitserve_client import Tokenizer
from splitserve_gateway.generation.prompts import (
    EncodedPrompt,
    beside_the_loop,
    check_chars,
    encode_text,
    truncated,
)
from splitserve_gateway.generation.serving import tokenizer_of
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.schemas.chat import ChatFields, ChatMessage
from splitserve_gateway.upstreams.upstream import Served

# The end of a prompt, in which an answer may have begun.
_NUM_END_CHARS = 1024
_NUM_END_TOKENS = 16


async def encode_chat(
    body: ChatFields,
    served: Served,
    tools: list[Mapping[str, object]] | None = None,
    truncate: int | None = None,
) -> EncodedPrompt:
    """The prompt of a chat; its `text` is how it ends. Raises ApiError and SplitserveError."""
    _check(body)
    tokenizer = tokenizer_of(served)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    adds = body.add_generation_prompt and not body.continue_final_message

    def render() -> str:
        return tokenizer.render_chat(
            [_message(message) for message in body.messages or ()],
            tools=tools,
            documents=body.documents,
            add_generation_prompt=adds,
            continue_final_message=body.continue_final_message,
            variables=variables,
        )

    text = await tokenizer.in_thread(render)
    check_chars("messages", len(text), truncate, served)
    adds_special = bool(body.add_special_tokens)
    token_ids = await beside_the_loop(
        tokenizer,
        len(text),
        lambda: encode_text(text, "messages", truncate, served, adds_special),
    )
    token_ids = truncated(token_ids, truncate, served)
    return EncodedPrompt(token_ids, body.continue_final_message, text[-_NUM_END_CHARS:])


def chat_of_tokens(token_ids: list[int], tokenizer: Tokenizer) -> EncodedPrompt:
    """A chat that the caller has rendered."""
    end = tokenizer.decode(token_ids[-_NUM_END_TOKENS:], skip_special_tokens=False)
    return EncodedPrompt(token_ids, is_continued=False, text=end)


def _check(body: ChatFields) -> None:
    if not body.messages:
        raise invalid("messages is empty; allowed: 1 or more", "messages")
    is_given = "add_generation_prompt" in body.model_fields_set
    if body.continue_final_message and is_given and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise invalid(message, "continue_final_message")


def _message(message: ChatMessage) -> dict[str, Any]:
    """As templates know messages."""
    has_content = message.content is not None or message.refusal
    shape: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        # What stands for no content is the template's to say.
        "content": content_of(message) if has_content else None,
    }
    if message.tool_calls:
        shape["tool_calls"] = [
            call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls
        ]
    reasoning = message.reasoning_content or message.reasoning
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
    }
    return shape | {name: value for name, value in more.items() if value is not None}


def content_of(message: ChatMessage) -> str | list[dict[str, str]]:
    """A text, or text parts as templates know them."""
    match message.content:
        case None:
            return message.refusal or ""
        case str(text):
            return text
        case parts:
            texts = [part.text if part.type == "text" else part.refusal for part in parts]
            return [{"type": "text", "text": text} for text in texts]
