"""What a core has done so far, for those who watch it. Nothing is decided by it."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from scheduler_service.core.config import PreemptionMode


class PreemptionCause(Enum):
    """Why a request gave up its rows. SHARE: its tenant had more than its share of blocks."""

    BLOCKS = "blocks"
    SHARE = "share"
    URGENCY = "urgency"


class PrefixSource(Enum):
    """What became of prompt tokens when their request began."""

    COMPUTED = "computed"
    DEVICE = "device"
    HOST = "host"


class Tally:
    """Numbers that only grow. `preemptions`: by SWAP or RECOMPUTE, and by cause.

    `prefix_tokens`: prompt tokens of requests that began, by where they were found.
    """

    def __init__(self) -> None:
        self.preemptions = Counter[tuple[PreemptionMode, PreemptionCause]]()
        self.prefix_tokens = Counter[PrefixSource]()

    @property
    def num_preemptions(self) -> int:
        """Of all kinds."""
        return self.preemptions.total()

    def began(self, *, num_prompt_tokens: int, num_cached: int, num_on_host: int) -> None:
        """A request begins; `num_cached` of its prompt exist, `num_on_host` of these only there."""
        num_on_host = min(num_on_host, num_cached)
        self.prefix_tokens[PrefixSource.COMPUTED] += num_prompt_tokens - num_cached
        self.prefix_tokens[PrefixSource.DEVICE] += num_cached - num_on_host
        self.prefix_tokens[PrefixSource.HOST] += num_on_host
