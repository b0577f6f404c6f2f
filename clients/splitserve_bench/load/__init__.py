"""Load generation: sends requests when they are due, and records when tokens arrive."""

from splitserve_bench.load.generator import Generator, LocalLoad, Pace, TargetUnusable
from splitserve_bench.load.outcome import LoadAbandoned, Outcome, Watcher
from splitserve_bench.load.process_load import (
    AssignLoad,
    Done,
    Failed,
    LoadProcessFailed,
    ProcessLoad,
    Ready,
    Relay,
    Run,
    StopLoad,
    receive,
    send,
)

__all__ = [
    "AssignLoad",
    "Done",
    "Failed",
    "Generator",
    "LoadAbandoned",
    "LoadProcessFailed",
    "LocalLoad",
    "Outcome",
    "Pace",
    "ProcessLoad",
    "Ready",
    "Relay",
    "Run",
    "StopLoad",
    "TargetUnusable",
    "Watcher",
    "receive",
    "send",
]
