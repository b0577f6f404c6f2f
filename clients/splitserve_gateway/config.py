"""The gateway's configuration, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from splitserve_rpc.security import check_exposure

ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral", "json", "none"]
ReasoningParserName = Literal["auto", "think", "mistral", "none"]

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything the gateway process reads.

    `schedulers`: addresses, at least one. `max_body_bytes`: of one request; 16 times that of all
    that are not encoded yet. `request_timeout_s`: from the arrival of a request to its end.
    `max_concurrent_requests`: that are answered at a time. `max_unread_bytes`: of one request's
    tokens that its client is behind; 16 times that of all. `drain_timeout_s`: what open requests
    get at shutdown.
    `http_cors_origins`: of web pages that may use it from a browser; `*` for any.
    `tool_call_parser`, `reasoning_parser`: the model's notation; auto: by its chat template.
    """

    http: str = "127.0.0.1:8000"
    schedulers: tuple[str, ...] = ("127.0.0.1:50051",)
    max_body_bytes: int = 16 * _MIB
    request_timeout_s: float = 3600.0
    max_concurrent_requests: int = 4096
    max_unread_bytes: int = 16 * _MIB
    drain_timeout_s: float = 10.0
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    http_cors_origins: tuple[str, ...] = ()
    log_level: str = "info"
    exit_on_stdin_eof: bool = False

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> GatewayConfig:
        """From parsed options, whose types and ranges are checked already.

        Raises SecurityUnusable.
        """
        insecure = values["insecure"]
        check_exposure("http", values["http"], is_protected=False, insecure=insecure)
        return cls(
            http=values["http"],
            schedulers=tuple(values["schedulers"].split(",")),
            max_body_bytes=values["max_body_mib"] * _MIB,
            request_timeout_s=values["request_timeout_s"],
            max_concurrent_requests=values["max_concurrent_requests"],
            max_unread_bytes=values["max_unread_mib"] * _MIB,
            drain_timeout_s=values["drain_timeout_s"],
            tool_call_parser=values["tool_call_parser"],
            reasoning_parser=values["reasoning_parser"],
            http_cors_origins=tuple(filter(None, (values["http_cors_origins"] or "").split(","))),
            log_level=values["log_level"],
            exit_on_stdin_eof=values["exit_on_stdin_eof"],
        )
