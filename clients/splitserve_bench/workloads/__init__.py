"""Workloads: requests and their times, drawn from a seed or recorded."""

from splitserve_bench.workloads.conversation import (
    FORMS,
    Conversation,
    Distribution,
    Limits,
    PromptPiece,
    PromptTokens,
    SharedPrefix,
    SyntheticLoad,
    Turn,
)
from splitserve_bench.workloads.traces import TraceUnreadable, read_trace

__all__ = [
    "FORMS",
    "Conversation",
    "Distribution",
    "Limits",
    "PromptPiece",
    "PromptTokens",
    "SharedPrefix",
    "SyntheticLoad",
    "TraceUnreadable",
    "Turn",
    "read_trace",
]
