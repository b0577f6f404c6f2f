"""Options of logs, metrics, traces and the journal."""

from __future__ import annotations

from splitserve_options.option import COMMANDS, Command, Option, OptionKind

_OTHER = "Process"
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")
_STREAMING: tuple[Command, ...] = ("serve", "scheduler", "gateway")

OBSERVABILITY_OPTIONS: tuple[Option, ...] = (
    Option(
        "log-level",
        OptionKind.CHOICE,
        "minimum level of events to log, on standard error",
        _OTHER,
        COMMANDS,
        default="info",
        default_of=(("serve", "warning"),),
        choices=("debug", "info", "warning", "error"),
    ),
    Option(
        "log-format",
        OptionKind.CHOICE,
        "text lines for people, or one JSON object a line with the event's name and fields",
        _OTHER,
        COMMANDS,
        default="text",
        choices=("text", "json"),
    ),
    Option(
        "metrics-listen",
        OptionKind.ADDRESS,
        "address where Prometheus reads /metrics; beyond this machine it needs tls-cert, tls-"
        "key and tls-ca, and a client certificate; serve: of the scheduler; the gateway has "
        "the next port, executors the ports after it",
        _OTHER,
        COMMANDS,
        default_text="no metrics",
    ),
    Option(
        "allowed-hosts",
        OptionKind.HOSTS,
        "additional host names for requests without a credential to the HTTP servers, metrics"
        " included; addresses and names that cannot be in the public DNS are always allowed",
        _OTHER,
        COMMANDS,
        default_text="none",
        metavar="NAME,...",
    ),
    Option(
        "traces-to",
        OptionKind.TEXT,
        "OpenTelemetry collector for traces of requests (OTLP over gRPC); https:// beyond "
        "this machine. Certificates and headers: OTEL_EXPORTER_OTLP_* in the environment",
        _OTHER,
        _STREAMING,
        default_text="no traces",
        metavar="http://HOST:PORT",
    ),
    Option(
        "trace-sampling",
        OptionKind.NUMBER,
        "share of requests to trace among those without a traceparent header",
        _OTHER,
        _STREAMING,
        0.01,
        minimum=0,
        maximum=1,
    ),
    Option(
        "traces-asked-per-s",
        OptionKind.NUMBER,
        "maximum number of traces a second for callers that ask for one; a scheduler also "
        "counts those of gateways without a key of their own. Beyond it trace-sampling "
        "decides",
        _OTHER,
        _STREAMING,
        50.0,
        minimum=0,
        maximum=1_000_000,
    ),
    Option(
        "remember-requests",
        OptionKind.INTEGER,
        "number of ended requests whose history is kept (splitserve explain); 0 keeps none, "
        "not even of running requests",
        _OTHER,
        _SERVE_SCHEDULER,
        1000,
        minimum=0,
        maximum=100_000,
    ),
    Option(
        "journal",
        OptionKind.TEXT,
        "file that records the scheduler's input (token ids of prompts included) and decisions",
        _OTHER,
        _SERVE_SCHEDULER,
        default_text="nothing is recorded",
        metavar="FILE",
    ),
    Option(
        "journal-max-mib",
        OptionKind.INTEGER,
        "maximum size of both files of the journal together, in MiB",
        _OTHER,
        _SERVE_SCHEDULER,
        256,
        minimum=2,
        maximum=2**20,
    ),
)
