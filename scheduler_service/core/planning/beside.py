"""What others are about to take of a core that somebody is compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Beside:
    """What requests take together that are to begin in the same step."""

    num_tokens: int = 0
    num_rows: int = 0
    num_blocks: int = 0
    rows_of_tenants: Counter[str] = field(default_factory=Counter)


NOBODY = Beside()
