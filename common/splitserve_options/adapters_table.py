"""Options of LoRA adapters: which there are, and how many executors load."""

from __future__ import annotations

from splitserve_options.option import Command, Option, OptionKind

_ADAPTERS = "Adapters"
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")
_SERVE_EXECUTOR: tuple[Command, ...] = ("serve", "executor")

ADAPTERS_OPTIONS: tuple[Option, ...] = (
    Option(
        "adapter",
        OptionKind.ADAPTERS,
        "LoRA adapters, PEFT folders or GGUF files, and their names for requests; may be given "
        "several times",
        _ADAPTERS,
        _SERVE_SCHEDULER,
        default_text="none",
        metavar="NAME=DIR,...",
    ),
    Option(
        "adapters-file",
        OptionKind.TEXT,
        "file with one adapter a line (NAME=DIR), read again when it changes",
        _ADAPTERS,
        _SERVE_SCHEDULER,
        default_text="none",
        metavar="FILE",
    ),
    Option(
        "adapters-dir",
        OptionKind.TEXT,
        "directory of adapters: a request may name any folder in it",
        _ADAPTERS,
        _SERVE_SCHEDULER,
        default_text="none",
        metavar="DIRECTORY",
    ),
    Option(
        "max-adapters",
        OptionKind.INTEGER,
        "maximum number of adapters that are loaded at once; 0: none are served",
        _ADAPTERS,
        _SERVE_EXECUTOR,
        8,
        minimum=0,
        maximum=4096,
    ),
    Option(
        "max-adapter-rank",
        OptionKind.INTEGER,
        "maximum rank of an adapter",
        _ADAPTERS,
        _SERVE_EXECUTOR,
        64,
        minimum=1,
        maximum=1024,
    ),
    Option(
        "allow-adapter-loading",
        OptionKind.SWITCH,
        "without authentication: let every HTTP client load and unload adapters, from any folder "
        "that the scheduler can read",
        _ADAPTERS,
        ("serve", "gateway"),
        False,
    ),
)
