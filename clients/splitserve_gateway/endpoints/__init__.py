"""HTTP endpoints, one module per endpoint or family of endpoints."""

from splitserve_gateway.endpoints.chat import ChatChoice
from splitserve_gateway.endpoints.context import Gateway
from splitserve_gateway.endpoints.messages import MessageContent
from splitserve_gateway.endpoints.models import router
from splitserve_gateway.endpoints.openapi import docs_page, openapi_of
from splitserve_gateway.endpoints.responses import ResponseOutput
from splitserve_gateway.endpoints.shapes import (
    CompletionLogprobs,
    TokenNames,
    chat_logprobs,
    finite,
    joined,
    prompt_logprobs,
)

__all__ = [
    "ChatChoice",
    "CompletionLogprobs",
    "Gateway",
    "MessageContent",
    "ResponseOutput",
    "TokenNames",
    "chat_logprobs",
    "docs_page",
    "finite",
    "joined",
    "openapi_of",
    "prompt_logprobs",
    "router",
]
