"""Options of logs, metrics, traces and the journal."""

from __future__ import annotations

from splitserve_options.option import COMMANDS, Command, Kind, Option

_OTHER = "Process"
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")
_STREAMING: tuple[Command, ...] = ("serve", "scheduler", "gateway")

OBSERVABILITY_OPTIONS: tuple[Option, ...] = (
    Option(
        "log-level",
        Kind.CHOICE,
        "least urgent messages to log, on standard error",
        _OTHER,
        COMMANDS,
        default="info",
        default_of=(("serve", "warning"),),
        choices=("debug", "info", "warning", "error"),
    ),
    Option(
        "log-format",
        Kind.CHOICE,
        "how: lines for people, or each event as a line of JSON with its name and fields",
        _OTHER,
        COMMANDS,
        default="text",
        choices=("text", "json"),
    ),
    Option(
        "metrics-listen",
        Kind.ADDRESS,
        "address where Prometheus reads numbers at /metrics; beyond this machine with tls-cert, "
        "tls-key and tls-ca, and for those with a certificate; serve: of the scheduler, the "
        "gateway has the next port, executors those after it",
        _OTHER,
        COMMANDS,
        default_text="no metrics",
    ),
    Option(
        "allowed-hosts",
        Kind.HOSTS,
        "further names by which whoever asks without a credential may call what listens for HTTP "
        "here, metrics included; addresses and names that the public DNS cannot have are always "
        "allowed",
        _OTHER,
        COMMANDS,
        default_text="none",
        metavar="NAME,...",
    ),
    Option(
        "traces-to",
        Kind.TEXT,
        "collector of OpenTelemetry that gets traces of requests (OTLP over gRPC); https:// beyond "
        "this machine. Certificates, headers and the like: OTEL_EXPORTER_OTLP_* in the environment",
        _OTHER,
        _STREAMING,
        default_text="no traces",
        metavar="http://HOST:PORT",
    ),
    Option(
        "trace-sampling",
        Kind.NUMBER,
        "share of the requests that are traced, of those whose callers say nothing (traceparent)",
        _OTHER,
        _STREAMING,
        0.01,
        minimum=0,
        maximum=1,
    ),
    Option(
        "traces-asked-per-s",
        Kind.NUMBER,
        "most traces a second for callers that ask for one; a scheduler counts those that gateways "
        "without a key of their own trace among them. Beyond it trace-sampling says which are",
        _OTHER,
        _STREAMING,
        50.0,
        minimum=0,
        maximum=1_000_000,
    ),
    Option(
        "remember-requests",
        Kind.INTEGER,
        "of so many requests that ended it is known what happened to them (splitserve explain); "
        "0: of none, nor of those that run",
        _OTHER,
        _SERVE_SCHEDULER,
        1000,
        minimum=0,
        maximum=100_000,
    ),
    Option(
        "journal",
        Kind.TEXT,
        "file that records what the scheduler is told (token ids of prompts too) and decides",
        _OTHER,
        _SERVE_SCHEDULER,
        default_text="nothing is recorded",
        metavar="FILE",
    ),
    Option(
        "journal-max-mib",
        Kind.INTEGER,
        "most MiB of both files of the journal together",
        _OTHER,
        _SERVE_SCHEDULER,
        256,
        minimum=2,
        maximum=2**20,
    ),
)
