"""Options of scheduling: queue and batch policy, preemption, caching, tokens per step."""

from __future__ import annotations

from splitserve_options.option import Command, Option, OptionKind

_POLICY = "Scheduling"
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")

SCHEDULING_OPTIONS: tuple[Option, ...] = (
    Option(
        "queue-policy",
        OptionKind.CHOICE,
        "order of waiting requests: by arrival, by priority, by service that the tenant "
        "received, by deadline",
        _POLICY,
        _SERVE_SCHEDULER,
        "fcfs",
        choices=("fcfs", "priority", "fair", "deadline"),
    ),
    Option(
        "tenant-weights",
        OptionKind.TEXT,
        "shares of tenants for the queue policy fair; a tenant that is not listed has 1",
        _POLICY,
        _SERVE_SCHEDULER,
        default_text="all alike",
        metavar="NAME=WEIGHT,...",
    ),
    Option(
        "batch-policy",
        OptionKind.CHOICE,
        "decodes and prompts in one step, or steps of whole prompts before steps of decodes",
        _POLICY,
        _SERVE_SCHEDULER,
        "mixed",
        choices=("mixed", "prefill-first"),
    ),
    Option(
        "delay-factor",
        OptionKind.NUMBER,
        "with prefill-first: prompts wait for this multiple of the duration of the last "
        "prompt step",
        _POLICY,
        _SERVE_SCHEDULER,
        0.0,
        minimum=0,
        maximum=1000,
    ),
    Option(
        "preemption-mode",
        OptionKind.CHOICE,
        "swap the KV of a preempted request to host memory, recompute it, or whichever costs less",
        _POLICY,
        _SERVE_SCHEDULER,
        "auto",
        choices=("auto", "swap", "recompute"),
    ),
    Option(
        "no-prefix-caching",
        OptionKind.SWITCH,
        "disable the prefix cache: compute every prompt in full",
        _POLICY,
        _SERVE_SCHEDULER,
        False,
    ),
    Option(
        "no-host-prefix-cache",
        OptionKind.SWITCH,
        "drop cached blocks that are evicted from the device, instead of keeping them in host"
        " memory",
        _POLICY,
        _SERVE_SCHEDULER,
        False,
    ),
    Option(
        "share-prefixes-across-tenants",
        OptionKind.SWITCH,
        "let requests use cached prompts of other tenants; timing then reveals what others sent",
        _POLICY,
        _SERVE_SCHEDULER,
        False,
    ),
    Option(
        "step-time-ms",
        OptionKind.INTEGER,
        "wanted duration of steps that compute prompts, in ms; prompts are split accordingly, by"
        " the measured times of earlier steps; longer where the other tokens of a step alone take"
        " more than a quarter of it; 0 for no limit",
        _POLICY,
        _SERVE_SCHEDULER,
        120,
        minimum=0,
        maximum=60_000,
    ),
    Option(
        "target-itl-ms",
        OptionKind.INTEGER,
        "wanted time between the tokens of a sequence while prompts are computed beside it, in ms,"
        " if less than --step-time-ms; prompts get a quarter of a step's time at least; 0 for none",
        _POLICY,
        _SERVE_SCHEDULER,
        0,
        minimum=0,
        maximum=60_000,
    ),
    Option(
        "num-lookahead-slots",
        OptionKind.INTEGER,
        "KV slots allocated for each sequence beyond its tokens, where blocks are free; block"
        " tables are sent earlier (--max-run-ahead and --speculation do not need it)",
        _POLICY,
        _SERVE_SCHEDULER,
        0,
        minimum=0,
        maximum=1024,
    ),
    Option(
        "max-run-ahead",
        OptionKind.INTEGER,
        "maximum number of tokens of a sequence in one step, while no request waits and where"
        " executors support it",
        _POLICY,
        _SERVE_SCHEDULER,
        32,
        minimum=1,
        maximum=256,
    ),
    Option(
        "max-run-ahead-ms",
        OptionKind.INTEGER,
        "time limit of a step with several tokens, estimated from earlier ones, in ms; half "
        "of it behind another such step where executors do not report tokens at once, as new"
        " requests wait for both",
        _POLICY,
        _SERVE_SCHEDULER,
        40,
        minimum=1,
        maximum=10_000,
    ),
    Option(
        "speculation",
        OptionKind.CHOICE,
        "source of draft tokens that executors verify together: prompt-lookup copies what "
        "followed the latest tokens earlier in the same sequence; it pays for repetitive text"
        " and changes no token",
        _POLICY,
        _SERVE_SCHEDULER,
        "off",
        choices=("off", "prompt-lookup"),
    ),
    Option(
        "max-num-encoder-tokens",
        OptionKind.INTEGER,
        "maximum number of encoder tokens that one step encodes, beside its other tokens; a longer"
        " input has a step's encoder to itself",
        _POLICY,
        _SERVE_SCHEDULER,
        2048,
        minimum=1,
        maximum=2**20,
    ),
    Option(
        "max-draft-tokens",
        OptionKind.INTEGER,
        "maximum number of draft tokens of a sequence in one step; fewer are drafted while "
        "the acceptance rate is low",
        _POLICY,
        _SERVE_SCHEDULER,
        16,
        minimum=1,
        maximum=64,
    ),
    Option(
        "max-loras",
        OptionKind.INTEGER,
        "maximum number of distinct adapters in one step, within the limit of the executor",
        _POLICY,
        _SERVE_SCHEDULER,
        4096,
        minimum=1,
        maximum=4096,
    ),
)
