"""Options of the gateway."""

from __future__ import annotations

from splitserve_options.option import DEFAULT_ADDRESS, Command, Kind, Option

_HTTP = "HTTP"
_GATEWAY: tuple[Command, ...] = ("gateway",)
_SERVE_GATEWAY: tuple[Command, ...] = ("serve", "gateway")

GATEWAY_OPTIONS: tuple[Option, ...] = (
    Option(
        "http",
        Kind.ADDRESS,
        "address to serve HTTP on",
        _HTTP,
        _SERVE_GATEWAY,
        "127.0.0.1:8000",
    ),
    Option(
        "no-http",
        Kind.SWITCH,
        "do not start a gateway",
        _HTTP,
        ("serve",),
        False,
    ),
    Option(
        "schedulers",
        Kind.SCHEDULERS,
        "the schedulers to send requests to: a list, dns:HOST:PORT for all addresses of a name, or "
        "file:PATH for one address a line, read again when it changes",
        _HTTP,
        _GATEWAY,
        DEFAULT_ADDRESS,
        metavar="HOST:PORT,...",
    ),
    Option(
        "tool-call-parser",
        Kind.CHOICE,
        "how the model writes calls of tools (auto: as its chat template says)",
        _HTTP,
        _SERVE_GATEWAY,
        "auto",
        choices=("auto", "hermes", "llama3_json", "mistral", "json", "none"),
    ),
    Option(
        "reasoning-parser",
        Kind.CHOICE,
        "how the model marks reasoning (auto: as its chat template says)",
        _HTTP,
        _SERVE_GATEWAY,
        "auto",
        choices=("auto", "think", "mistral", "none"),
    ),
    Option(
        "max-body-mib",
        Kind.INTEGER,
        "most MiB of a request's body, and 16 times that of all that are not encoded yet",
        _HTTP,
        _SERVE_GATEWAY,
        16,
        minimum=1,
        maximum=1024,
    ),
    Option(
        "request-timeout-s",
        Kind.NUMBER,
        "seconds a request may take from its arrival to its end",
        _HTTP,
        _SERVE_GATEWAY,
        3600.0,
        minimum=0,
        maximum=86400 * 7,
        above=True,
    ),
    Option(
        "max-concurrent-requests",
        Kind.INTEGER,
        "requests that are answered at a time; more get 429",
        _HTTP,
        _SERVE_GATEWAY,
        4096,
        minimum=1,
        maximum=1_000_000,
    ),
    Option(
        "live-listen",
        Kind.ADDRESS,
        "address to serve the live page on, for operators; beyond this machine as http; serve: "
        "127.0.0.1:8001, or another port if that is taken",
        _HTTP,
        _SERVE_GATEWAY,
        default_text="no page",
    ),
    Option(
        "live-socket",
        Kind.INTEGER,
        "a file descriptor that listens at live-listen already, of the parent that found it free",
        _HTTP,
        _GATEWAY,
        minimum=0,
        maximum=2**31 - 1,
        hidden=True,
    ),
    Option(
        "live-schedulers",
        Kind.SCHEDULERS,
        "where schedulers listen for operators (cluster-listen), for the live page; as schedulers",
        _HTTP,
        _GATEWAY,
        default_text="those of schedulers",
        metavar="HOST:PORT,...",
    ),
    Option(
        "no-live",
        Kind.SWITCH,
        "do not serve the live page",
        _HTTP,
        ("serve",),
        False,
    ),
    Option(
        "http-cors-origins",
        Kind.ORIGINS,
        "web pages that may use the API from a browser",
        _HTTP,
        _SERVE_GATEWAY,
        default_text="none",
        metavar="ORIGIN,...",
    ),
)
