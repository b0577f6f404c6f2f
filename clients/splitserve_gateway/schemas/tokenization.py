"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from splitserve_gateway.schemas.base import ApiRequest, Flag, TokenIds
from splitserve_gateway.schemas.chat import ChatFields


class TokenizeRequest(ChatFields):
    """What `/tokenize` takes: `prompt`, or `messages` and what a chat's template reads."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False


class DetokenizeRequest(ApiRequest):
    """What `/detokenize` takes."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: Flag = False
