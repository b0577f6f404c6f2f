"""Speculation: drafts that guess next tokens, and steps that verify several guesses at once."""

from executor_service.speculation.draft_loading import (
    BUNDLED_DRAFT_DIRECTORY,
    check_draft,
    load_draft,
)
from executor_service.speculation.draft_model import (
    DraftedRow,
    DraftLimits,
    DraftModel,
    LoadedProposer,
)
from executor_service.speculation.draft_totals import DraftTotals
from executor_service.speculation.speculating_runner import (
    MAX_GUESSES,
    AcceptanceRate,
    DraftLengths,
    PassTimes,
    SpeculatingRunner,
)

__all__ = [
    "BUNDLED_DRAFT_DIRECTORY",
    "MAX_GUESSES",
    "AcceptanceRate",
    "DraftLengths",
    "DraftLimits",
    "DraftModel",
    "DraftTotals",
    "DraftedRow",
    "LoadedProposer",
    "PassTimes",
    "SpeculatingRunner",
    "check_draft",
    "load_draft",
]
