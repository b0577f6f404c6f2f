"""Speculation: draft tokens of rows, their acceptance rates, and how many of them pay."""

from scheduler_service.scheduler.engine.speculation.draft_lengths import (
    DraftLengths,
    DraftTotals,
    PassTimes,
    choose_lengths,
)
from scheduler_service.scheduler.engine.speculation.prompt_lookup import (
    AcceptanceRates,
    PromptLookup,
    Proposer,
)

__all__ = [
    "AcceptanceRates",
    "DraftLengths",
    "DraftTotals",
    "PassTimes",
    "PromptLookup",
    "Proposer",
    "choose_lengths",
]
