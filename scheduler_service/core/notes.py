"""What a core did to requests while it planned: told with the plan, for those who watch.

Nothing is decided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from scheduler_service.core.config import PreemptionMode
from scheduler_service.core.request import Request
from scheduler_service.core.tally import PreemptionCause


@dataclass(frozen=True, slots=True)
class Began:
    """It has rows from now on, with `num_tokens` known tokens.

    `num_cached` of them need not be computed, and of these `num_on_host` come from the host pool.
    """

    request: Request
    num_tokens: int
    num_cached: int
    num_on_host: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """It gave up its rows. `mode`: SWAP or RECOMPUTE."""

    request: Request
    mode: PreemptionMode
    cause: PreemptionCause


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """Its blocks come back from the host pool, and it goes on."""

    request: Request


@dataclass(frozen=True, slots=True)
class KvLost:
    """A step failed that it leaned on: what it had computed is computed again."""

    request: Request


Note: TypeAlias = Began | Preempted | SwappedIn | KvLost
