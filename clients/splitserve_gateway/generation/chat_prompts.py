"""Messages as the model's own template renders them."""

from __future__ import annotations

import asyncio
from typing import Any

from splitserve_client import Tokenizer
from splitserve_gateway.generation.prompts import EncodedPrompt, tokenizer_of
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.schemas.chat import ChatMessage, ChatRequest
from splitserve_gateway.upstreams.upstream import Served


async def encode_chat(body: ChatRequest, served: Served) -> EncodedPrompt:
    """The prompt of a chat. Raises ApiError and SplitserveError."""
    if not body.messages:
        raise invalid("messages is empty; allowed: 1 or more", "messages")
    messages = [_message(message) for message in body.messages]
    token_ids = await asyncio.to_thread(_encode, tokenizer_of(served), messages)
    return EncodedPrompt(token_ids, is_continued=body.continue_final_message)


def _encode(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer.encode_chat(messages)


def _message(message: ChatMessage) -> dict[str, Any]:
    """As templates know messages."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or part.refusal or "" for part in content)
    return {"role": role, "content": content}
