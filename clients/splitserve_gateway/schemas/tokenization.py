"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from splitserve_gateway.schemas.base import ApiRequest, Flag, Name, TokenIds
from splitserve_gateway.schemas.chat import ChatFields


class TokenizeRequest(ChatFields):
    """What `/tokenize` takes: `prompt`, or `messages` and what a chat's template reads."""

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False


class DetokenizeRequest(ApiRequest):
    """What `/detokenize` takes."""

    model: Name | None = None
    tokens: TokenIds
    skip_special_tokens: Flag = False
