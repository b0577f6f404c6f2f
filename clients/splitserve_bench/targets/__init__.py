"""Targets of the load: splitserve schedulers over gRPC, or servers of OpenAI's API over HTTP."""

from splitserve_bench.targets.scheduler_target import TargetRefused, open_target, parse_target
from splitserve_bench.targets.target import (
    AnswerSummary,
    AskFailed,
    AskOptions,
    Dialog,
    Exchange,
    Part,
    Target,
    TargetAddress,
    Tokens,
)

__all__ = [
    "AnswerSummary",
    "AskFailed",
    "AskOptions",
    "Dialog",
    "Exchange",
    "Part",
    "Target",
    "TargetAddress",
    "TargetRefused",
    "Tokens",
    "open_target",
    "parse_target",
]
