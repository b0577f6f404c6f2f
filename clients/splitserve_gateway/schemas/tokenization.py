"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from pydantic import ConfigDict

from splitserve_gateway.schemas.base import ApiRequest, Flag, Name, TokenIds, needs_one_of
from splitserve_gateway.schemas.chat import ChatFields


class TokenizeRequest(ChatFields):
    """What `/tokenize` takes: `prompt`, or `messages` and what a chat's template reads."""

    model_config = ConfigDict(json_schema_extra=needs_one_of("prompt", "messages"))

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False


class DetokenizeRequest(ApiRequest):
    """What `/detokenize` takes."""

    model: Name | None = None
    tokens: TokenIds
    skip_special_tokens: Flag = False
