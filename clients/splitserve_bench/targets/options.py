"""What is asked of every target, beside lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from splitserve_rpc.tls import TlsFiles

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class AskOptions:
    """`token_range`: prompts are made of these ids, the first and the one after the last.

    `ignores_eos`: answers are as long as they were wanted. `model`: None for the first that an
    OpenAI server lists. `counts_tokens`: asks for usage in every event, which not all servers know.
    `extra_body`: more fields of a body for OpenAI's API.
    """

    temperature: float = 0.0
    ignores_eos: bool = True
    token_range: tuple[int, int] = (10, 1000)
    endpoint: Endpoint = "completions"
    model: str | None = None
    counts_tokens: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetAddress:
    """Whom to ask, by which name in reports. `url`: grpc://host:port, or http(s)://host:port/v1."""

    name: str
    url: str
    api_key_file: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
