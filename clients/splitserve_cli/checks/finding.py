"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """WARNING: it works, and will not always, or not as well as it could. WRONG: it does not."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """`name`: what was looked at. `meaning`, `remedy`: what that leads to, and what to do."""

    name: str
    state: State
    found: str
    meaning: str = ""
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, State.OK, found)


def warning(name: str, found: str, meaning: str, remedy: str) -> Finding:
    """See State."""
    return Finding(name, State.WARNING, found, meaning, remedy)


def wrong(name: str, found: str, meaning: str, remedy: str) -> Finding:
    """See State."""
    return Finding(name, State.WRONG, found, meaning, remedy)
