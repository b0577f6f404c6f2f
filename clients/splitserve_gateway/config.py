"""Configuration of the gateway, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from splitserve_common import (
    ANY,
    FilesUnusable,
    is_address,
    is_loopback,
    missing_for_http,
    read_bytes,
    split_hosts,
)
from splitserve_metrics import MetricsAddress
from splitserve_rpc import SecurityUnusable, TlsFiles, check_exposure, check_pair
from splitserve_text import (
    ChatTemplateFailed,
    ChatTemplates,
    ReasoningParserName,
    ToolCallParserName,
)
from splitserve_tracing import TraceConfig

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """Address of the live page, and the schedulers whose operator listeners it reads.

    `socket`: descriptor of a socket that already listens there; None to open one.
    """

    listen: str
    schedulers: str
    socket: int | None = None


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Configuration of the gateway process.

    `http_tls`: files of HTTPS; None for plain HTTP. `schedulers`: addresses in the form of
    `splitserve_common.scheduler_discovery`; `scheduler_tls`: TLS files, None for plain
    text. `gateway_key_file`: holds the gateway's own credential; if set, every request needs a
    credential, too. `max_body_bytes`: of one request; all bodies that are not encoded yet may have
    16 times as much. `max_audio_bytes`, `max_audio_s`: of one file of audio. `request_timeout_s`:
    from the arrival of a request to its end. `max_concurrent_requests`: maximum number of open
    requests. `max_unread_bytes`: tokens of one request that its client has not read yet; 16 times
    that for all requests. `drain_timeout_s`: time for open requests at shutdown.
    `http_cors_origins`: origins of web pages that may use the API from a browser; `*` for any.
    `allowed_hosts`: further host names that callers without a credential may use. `live`: None if
    no live page is served. `operator_schedulers`: addresses of schedulers for operators.
    `allow_adapter_loading`: whether callers without a credential may load and unload adapters.
    `chat_template`: source of a chat template in place of the models' own; None to use theirs.
    `tool_call_parser`, `reasoning_parser`: the model's notation; auto: detected by its chat
    template. `unknown_fields`: what is done with fields of requests that are not known.
    `resume_streams_s`: time for which a broken stream can be resumed; 0: never.
    """

    http: str = "127.0.0.1:8000"
    http_tls: TlsFiles | None = None
    scheduler_tls: TlsFiles | None = None
    gateway_key_file: Path | None = None
    schedulers: str = "127.0.0.1:50051"
    max_body_bytes: int = 16 * _MIB
    max_audio_bytes: int = 25 * _MIB
    max_audio_s: float = 7200.0
    request_timeout_s: float = 3600.0
    max_concurrent_requests: int = 4096
    max_unread_bytes: int = 16 * _MIB
    drain_timeout_s: float = 10.0
    chat_template: str | None = None
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    resume_streams_s: float = 60.0
    http_cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    exit_on_stdin_eof: bool = False
    metrics: MetricsAddress | None = None
    live: LiveConfig | None = None
    operator_schedulers: str = "127.0.0.1:50051"
    allow_adapter_loading: bool = False
    traces: TraceConfig | None = None

    def hosts(self, listen: str) -> tuple[str, ...] | None:
        """Returns the host names allowed for the listener at `listen`, in the form of WebGuard.

        None if all callers need a credential: then no guard is needed. Over HTTPS any name is
        allowed, since the certificate is valid only for the gateway's own names.
        """
        if self.gateway_key_file is not None:
            return None
        if self.http_tls is not None:
            return (ANY,)
        return (listen.rpartition(":")[0], *self.allowed_hosts)

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> GatewayConfig:
        """Builds the configuration from parsed options, whose types and ranges are already checked.

        Raises SecurityUnusable, and FilesUnusable for the chat template.
        """
        http_tls = _http_tls(values)
        gateway_key_file = _path(values["gateway_key_file"])
        missing = missing_for_http(
            is_encrypted=http_tls is not None,
            knows_clients=gateway_key_file is not None
            or (http_tls is not None and http_tls.ca is not None),
        )
        for option in ("http", "live-listen"):
            if (address := values[option.replace("-", "_")]) is not None:
                check_exposure(
                    option,
                    address,
                    is_protected=not missing,
                    insecure=values["insecure"],
                    problem=missing,
                )
        scheduler_tls = _scheduler_tls(values)
        schedulers = values["schedulers"]
        if gateway_key_file is not None and scheduler_tls is None and not values["insecure"]:
            _check_plain_text(schedulers)
        return cls(
            http=values["http"],
            http_tls=http_tls,
            scheduler_tls=scheduler_tls,
            gateway_key_file=gateway_key_file,
            schedulers=schedulers,
            max_body_bytes=values["max_body_mib"] * _MIB,
            max_audio_bytes=values["max_audio_mib"] * _MIB,
            max_audio_s=values["max_audio_minutes"] * 60.0,
            request_timeout_s=values["request_timeout_s"],
            max_concurrent_requests=values["max_concurrent_requests"],
            max_unread_bytes=values["max_unread_mib"] * _MIB,
            drain_timeout_s=values["drain_timeout_s"],
            chat_template=_chat_template(_path(values["chat_template"])),
            tool_call_parser=values["tool_call_parser"],
            reasoning_parser=values["reasoning_parser"],
            unknown_fields=values["unknown_fields"],
            resume_streams_s=values["resume_streams_s"],
            http_cors_origins=tuple(filter(None, (values["http_cors_origins"] or "").split(","))),
            allowed_hosts=split_hosts(values["allowed_hosts"]),
            exit_on_stdin_eof=values["exit_on_stdin_eof"],
            metrics=MetricsAddress.from_options(values),
            live=_live(values),
            operator_schedulers=values["live_schedulers"] or schedulers,
            allow_adapter_loading=values["allow_adapter_loading"],
            traces=TraceConfig.from_options(values),
        )


def _live(values: Mapping[str, Any]) -> LiveConfig | None:
    listen = values["live_listen"]
    if listen is None:
        return None
    schedulers = values["live_schedulers"] or values["schedulers"]
    return LiveConfig(listen, schedulers, values["live_socket"])


def _http_tls(values: Mapping[str, Any]) -> TlsFiles | None:
    """Returns the files of HTTPS; None without a certificate. Raises SecurityUnusable."""
    names = ("http_tls_cert", "http_tls_key", "http_tls_client_ca")
    cert, key, client_ca = (_path(values[name]) for name in names)
    check_pair(cert, key, "http-tls")
    if cert is None and client_ca is not None:
        raise SecurityUnusable(
            "--http-tls-client-ca is given without --http-tls-cert and --http-tls-key"
        )
    return None if cert is None else TlsFiles(cert, key, client_ca)


def _scheduler_tls(values: Mapping[str, Any]) -> TlsFiles | None:
    """Returns the TLS files for schedulers; None without any. Raises SecurityUnusable."""
    files = TlsFiles(*(_path(values[name]) for name in ("tls_cert", "tls_key", "tls_ca")))
    check_pair(files.cert, files.key)
    return None if files == TlsFiles() else files


def _check_plain_text(schedulers: str) -> None:
    """Raises SecurityUnusable for a scheduler on another machine: eavesdroppers would read the key.

    A discovered scheduler may be on any machine.
    """
    for address in schedulers.split(","):
        if not is_loopback(address):
            where = "is" if is_address(address) else "may be"
            raise SecurityUnusable(
                f"--schedulers {address}: {where} on another machine, and without --tls-ca the "
                "keys of the gateway and its callers would be sent in plain text "
                "(docs/security.md); --insecure allows it"
            )


def _chat_template(path: Path | None) -> str | None:
    """Returns the source of the chat template in a file. Raises FilesUnusable."""
    if path is None:
        return None
    try:
        source = read_bytes(path).decode()
        ChatTemplates({"default": source}, {})
    except (UnicodeDecodeError, ChatTemplateFailed) as error:
        raise FilesUnusable(f"--chat-template {path}: {error}") from error
    return source


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None
