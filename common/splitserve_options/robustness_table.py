"""Options of queue limits, and of the reaction to peers that do not answer."""

from __future__ import annotations

from splitserve_options.option import Command, Kind, Option

_ROBUST = "Queue and failures"
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")
_STREAMING: tuple[Command, ...] = ("serve", "scheduler", "gateway")

ROBUSTNESS_OPTIONS: tuple[Option, ...] = (
    Option(
        "max-num-waiting",
        Kind.INTEGER,
        "most requests that wait for a row, per executor; further ones are refused with QUEUE_FULL",
        _ROBUST,
        _SERVE_SCHEDULER,
        1024,
        minimum=1,
        maximum=2**20,
    ),
    Option(
        "max-unread-mib",
        Kind.INTEGER,
        "most MiB kept for a client that does not read its stream, and 16 times that for all; "
        "beyond it the stream ends",
        _ROBUST,
        _STREAMING,
        16,
        minimum=1,
        maximum=1024,
    ),
    Option(
        "executor-return-s",
        Kind.NUMBER,
        "seconds that requests wait for an executor that left, if no other one can run them; then "
        "they end, and new ones like them are refused",
        _ROBUST,
        _SERVE_SCHEDULER,
        300.0,
        minimum=0,
        maximum=86400,
    ),
    Option(
        "reconnect-timeout-s",
        Kind.NUMBER,
        "seconds a broken connection to an executor may take to come back before its requests move",
        _ROBUST,
        _SERVE_SCHEDULER,
        2.0,
        minimum=0,
        maximum=3600,
    ),
    Option(
        "step-timeout-s",
        Kind.NUMBER,
        "seconds a step may take at most before its executor counts as lost; the first of a size, "
        "and those of the last executor that answers, may take so long",
        _ROBUST,
        _SERVE_SCHEDULER,
        300.0,
        minimum=0,
        maximum=86400,
        above=True,
    ),
    Option(
        "step-patience-s",
        Kind.NUMBER,
        "seconds a step may take at least before its executor counts as lost; beyond them it may "
        "take three times what steps of its size took",
        _ROBUST,
        _SERVE_SCHEDULER,
        3.0,
        minimum=0,
        maximum=86400,
        above=True,
    ),
    Option(
        "max-executor-losses",
        Kind.INTEGER,
        "executors lost in succession during steps of a request until it is tried alone; one more "
        "fails it",
        _ROBUST,
        _SERVE_SCHEDULER,
        2,
        minimum=1,
        maximum=64,
    ),
    Option(
        "drain-timeout-s",
        Kind.NUMBER,
        "seconds that unfinished requests get at shutdown",
        _ROBUST,
        (*_STREAMING, "executor"),
        10.0,
        default_of=(("serve", 2.0),),
        minimum=0,
        maximum=3600,
    ),
)
