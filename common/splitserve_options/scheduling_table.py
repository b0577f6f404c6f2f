"""Options of scheduling: queue and batch policy, preemption, caching, tokens per step."""

from __future__ import annotations

from splitserve_options.option import Command, Kind, Option

_POLICY = "Scheduling"
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")

SCHEDULING_OPTIONS: tuple[Option, ...] = (
    Option(
        "queue-policy",
        Kind.CHOICE,
        "who is next: by arrival, by priority, by what the tenant was served, by deadline",
        _POLICY,
        _SERVE_SCHEDULER,
        "fcfs",
        choices=("fcfs", "priority", "fair", "deadline"),
    ),
    Option(
        "tenant-weights",
        Kind.TEXT,
        "shares of tenants for the queue policy fair; a tenant without one has 1",
        _POLICY,
        _SERVE_SCHEDULER,
        default_text="all alike",
        metavar="NAME=WEIGHT,...",
    ),
    Option(
        "batch-policy",
        Kind.CHOICE,
        "decodes and prompts in one step, or steps of whole prompts before steps of decodes",
        _POLICY,
        _SERVE_SCHEDULER,
        "mixed",
        choices=("mixed", "prefill-first"),
    ),
    Option(
        "delay-factor",
        Kind.NUMBER,
        "with prefill-first: prompts wait that many times as long as the last step of prompts took",
        _POLICY,
        _SERVE_SCHEDULER,
        0.0,
        minimum=0,
        maximum=1000,
    ),
    Option(
        "preemption-mode",
        Kind.CHOICE,
        "swap the KV of a preempted request to host memory, recompute it, or what costs less",
        _POLICY,
        _SERVE_SCHEDULER,
        "auto",
        choices=("auto", "swap", "recompute"),
    ),
    Option(
        "no-prefix-caching",
        Kind.SWITCH,
        "compute every prompt in full",
        _POLICY,
        _SERVE_SCHEDULER,
        False,
    ),
    Option(
        "no-host-prefix-cache",
        Kind.SWITCH,
        "do not keep cached blocks in host memory when the device needs their room",
        _POLICY,
        _SERVE_SCHEDULER,
        False,
    ),
    Option(
        "share-prefixes-across-tenants",
        Kind.SWITCH,
        "let requests use cached prompts of other tenants, which tells them what others asked",
        _POLICY,
        _SERVE_SCHEDULER,
        False,
    ),
    Option(
        "num-lookahead-slots",
        Kind.INTEGER,
        "KV slots that each sequence holds beyond its tokens, where there is room; tables are told"
        " earlier then, and none are kept free for others (--max-run-ahead and --speculation have"
        " theirs without this)",
        _POLICY,
        _SERVE_SCHEDULER,
        0,
        minimum=0,
        maximum=1024,
    ),
    Option(
        "max-run-ahead",
        Kind.INTEGER,
        "most tokens of a sequence in one step, while nobody waits, where executors can do so",
        _POLICY,
        _SERVE_SCHEDULER,
        8,
        minimum=1,
        maximum=256,
    ),
    Option(
        "max-run-ahead-ms",
        Kind.INTEGER,
        "how long a step may take that brings several tokens, by what such steps took, in ms; half"
        " of that behind another one, as whoever comes waits for both",
        _POLICY,
        _SERVE_SCHEDULER,
        80,
        minimum=1,
        maximum=10_000,
    ),
    Option(
        "speculation",
        Kind.CHOICE,
        "who guesses the next tokens, which executors verify together: prompt-lookup finds the last"
        " ones earlier in the same sequence, and guesses what came then; it pays where text repeats"
        " itself, and tokens are the same ones without",
        _POLICY,
        _SERVE_SCHEDULER,
        "off",
        choices=("off", "prompt-lookup"),
    ),
    Option(
        "max-draft-tokens",
        Kind.INTEGER,
        "most guesses of a sequence in one step; fewer are made as long as fewer pay",
        _POLICY,
        _SERVE_SCHEDULER,
        16,
        minimum=1,
        maximum=64,
    ),
    Option(
        "max-loras",
        Kind.INTEGER,
        "most distinct adapters in one step, as far as the executor can do as many",
        _POLICY,
        _SERVE_SCHEDULER,
        8,
        minimum=1,
        maximum=4096,
    ),
)
