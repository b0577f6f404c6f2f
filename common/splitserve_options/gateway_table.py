"""Options of the gateway."""

from __future__ import annotations

from splitserve_options.option import DEFAULT_ADDRESS, Command, Option, OptionKind

_HTTP = "HTTP"
_GATEWAY: tuple[Command, ...] = ("gateway",)
_SERVE_GATEWAY: tuple[Command, ...] = ("serve", "gateway")

_TOOL_CALLS = (
    "auto", "hermes", "qwen3_coder", "llama3_json", "llama4", "function_tag", "mistral", "deepseek",
    "deepseek_dsml", "kimi_k2", "glm", "hunyuan", "minimax", "tool_calls_tag", "nemotron", "gemma3",
    "gemma4", "functiongemma", "phi4_mini", "granite", "command", "command_r", "internlm2",
    "seed_oss", "lfm2", "olmo3", "apertus", "gigachat", "harmony", "json", "none",
)  # fmt: skip
_REASONING = (
    "auto", "think", "think_answer", "mistral", "seed", "command", "granite", "gemma4", "kimi_vl",
    "apriel", "harmony", "none",
)  # fmt: skip

GATEWAY_OPTIONS: tuple[Option, ...] = (
    Option(
        "http",
        OptionKind.ADDRESS,
        "address to serve HTTP on",
        _HTTP,
        _SERVE_GATEWAY,
        "127.0.0.1:8000",
    ),
    Option(
        "no-http",
        OptionKind.SWITCH,
        "do not start a gateway",
        _HTTP,
        ("serve",),
        False,
    ),
    Option(
        "schedulers",
        OptionKind.SCHEDULERS,
        "schedulers to send requests to: a list, dns:HOST:PORT for all addresses of a name, "
        "or file:PATH with one address a line, read again when it changes",
        _HTTP,
        _GATEWAY,
        DEFAULT_ADDRESS,
        metavar="HOST:PORT,...",
    ),
    Option(
        "chat-template",
        OptionKind.TEXT,
        "file with a chat template in Jinja, in place of the models' own ones",
        _HTTP,
        _SERVE_GATEWAY,
        default_text="of the model",
        metavar="FILE",
    ),
    Option(
        "tool-call-parser",
        OptionKind.CHOICE,
        "notation of the model's tool calls (auto: from its chat template)",
        _HTTP,
        _SERVE_GATEWAY,
        "auto",
        choices=_TOOL_CALLS,
    ),
    Option(
        "reasoning-parser",
        OptionKind.CHOICE,
        "notation of the model's reasoning (auto: from its chat template)",
        _HTTP,
        _SERVE_GATEWAY,
        "auto",
        choices=_REASONING,
    ),
    Option(
        "unknown-fields",
        OptionKind.CHOICE,
        "what is done with fields of requests that are not known (ignore: they are named in a "
        "header of the answer)",
        _HTTP,
        _SERVE_GATEWAY,
        "refuse",
        choices=("refuse", "ignore"),
    ),
    Option(
        "resume-streams-s",
        OptionKind.NUMBER,
        "time for which the stream of an answer can be resumed after its connection broke, in "
        "seconds (0: never, events have no ids)",
        _HTTP,
        _SERVE_GATEWAY,
        60.0,
        minimum=0,
        maximum=600,
    ),
    Option(
        "max-audio-mib",
        OptionKind.INTEGER,
        "maximum size of a file of audio in MiB",
        _HTTP,
        _SERVE_GATEWAY,
        25,
        minimum=1,
        maximum=1024,
    ),
    Option(
        "max-audio-minutes",
        OptionKind.INTEGER,
        "maximum length of the audio of one request in minutes",
        _HTTP,
        _SERVE_GATEWAY,
        120,
        minimum=1,
        maximum=10_000,
    ),
    Option(
        "max-body-mib",
        OptionKind.INTEGER,
        "maximum size of a request body in MiB; all bodies that are not yet encoded may take "
        "16 times that",
        _HTTP,
        _SERVE_GATEWAY,
        16,
        minimum=1,
        maximum=1024,
    ),
    Option(
        "request-timeout-s",
        OptionKind.NUMBER,
        "maximum time from a request's arrival to its end, in seconds",
        _HTTP,
        _SERVE_GATEWAY,
        3600.0,
        minimum=0,
        maximum=86400 * 7,
        above=True,
    ),
    Option(
        "max-concurrent-requests",
        OptionKind.INTEGER,
        "maximum number of concurrent requests; further ones get 429",
        _HTTP,
        _SERVE_GATEWAY,
        4096,
        minimum=1,
        maximum=1_000_000,
    ),
    Option(
        "live-listen",
        OptionKind.ADDRESS,
        "address to serve the live page for operators on; beyond this machine with the same "
        "protection as http; serve: 127.0.0.1:8001, or another port if it is in use",
        _HTTP,
        _SERVE_GATEWAY,
        default_text="no live page",
    ),
    Option(
        "live-socket",
        OptionKind.INTEGER,
        "file descriptor of a socket that already listens at live-listen, opened by the parent",
        _HTTP,
        _GATEWAY,
        minimum=0,
        maximum=2**31 - 1,
        hidden=True,
    ),
    Option(
        "live-schedulers",
        OptionKind.SCHEDULERS,
        "addresses where schedulers listen for operators (cluster-listen), for the live page and"
        " for loading adapters; same forms as schedulers",
        _HTTP,
        _GATEWAY,
        default_text="same as schedulers",
        metavar="HOST:PORT,...",
    ),
    Option(
        "no-live",
        OptionKind.SWITCH,
        "disable the live page",
        _HTTP,
        ("serve",),
        False,
    ),
    Option(
        "http-cors-origins",
        OptionKind.ORIGINS,
        "origins of web pages that may use the API from a browser",
        _HTTP,
        _SERVE_GATEWAY,
        default_text="none",
        metavar="ORIGIN,...",
    ),
)
