"""Options of queue limits, and of the reaction to peers that do not answer."""

from __future__ import annotations

from splitserve_options.option import Command, Option, OptionKind

_ROBUST = "Queue and failures"
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")
_STREAMING: tuple[Command, ...] = ("serve", "scheduler", "gateway")

ROBUSTNESS_OPTIONS: tuple[Option, ...] = (
    Option(
        "max-num-waiting",
        OptionKind.INTEGER,
        "maximum number of requests that wait for a row, per executor; further ones are "
        "refused with QUEUE_FULL",
        _ROBUST,
        _SERVE_SCHEDULER,
        1024,
        minimum=1,
        maximum=2**20,
    ),
    Option(
        "max-unread-mib",
        OptionKind.INTEGER,
        "maximum unread data of one client stream in MiB, and 16 times that of all streams; a"
        " stream beyond it ends",
        _ROBUST,
        _STREAMING,
        16,
        minimum=1,
        maximum=1024,
    ),
    Option(
        "executor-return-s",
        OptionKind.NUMBER,
        "time that requests wait for an executor that left, if no other can run them, in "
        "seconds; then they end, and similar new ones are refused",
        _ROBUST,
        _SERVE_SCHEDULER,
        300.0,
        minimum=0,
        maximum=86400,
    ),
    Option(
        "reconnect-timeout-s",
        OptionKind.NUMBER,
        "time for a broken connection to an executor to come back before its requests move, "
        "in seconds",
        _ROBUST,
        _SERVE_SCHEDULER,
        2.0,
        minimum=0,
        maximum=3600,
    ),
    Option(
        "step-timeout-s",
        OptionKind.NUMBER,
        "upper bound of a step's time limit, in seconds; applies to the first step of a size "
        "and to the last executor that answers; an executor beyond its limit is lost",
        _ROBUST,
        _SERVE_SCHEDULER,
        300.0,
        minimum=0,
        maximum=86400,
        above=True,
    ),
    Option(
        "step-patience-s",
        OptionKind.NUMBER,
        "lower bound of a step's time limit, in seconds; above it the limit is three times "
        "the duration of steps of that size",
        _ROBUST,
        _SERVE_SCHEDULER,
        3.0,
        minimum=0,
        maximum=86400,
        above=True,
    ),
    Option(
        "max-executor-losses",
        OptionKind.INTEGER,
        "number of successive executor losses during steps of a request before it is tried "
        "alone; one more fails it",
        _ROBUST,
        _SERVE_SCHEDULER,
        2,
        minimum=1,
        maximum=64,
    ),
    Option(
        "drain-timeout-s",
        OptionKind.NUMBER,
        "time for unfinished requests at shutdown, in seconds",
        _ROBUST,
        (*_STREAMING, "executor"),
        10.0,
        default_of=(("serve", 2.0),),
        minimum=0,
        maximum=3600,
    ),
)
