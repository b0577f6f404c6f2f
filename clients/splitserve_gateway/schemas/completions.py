"""`POST /v1/completions`."""

from __future__ import annotations

from pydantic import Field

from splitserve_gateway.schemas.base import ApiRequest


class CompletionRequest(ApiRequest):
    """What `/v1/completions` takes."""

    model: str | None = None
    prompt: str | list[int] = ""
    max_tokens: int | None = Field(default=16, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    user: str = Field(default="", max_length=128)
