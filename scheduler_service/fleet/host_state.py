"""What the fleet remembers of a host between two looks at it.

To look costs more than to compare, and a host changes only when it is given a request or goes on
with a step; so many requests are compared with what one look has seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.engine import Engine

# Costs are those of so many at once, so that little is lost by whole nanoseconds.
_NUM_MEASURED = 1000
# Who comes to a host shares its steps with every row there for a while: as many tokens for each.
_ROW_TOKENS = 16
# While no step of any executor was measured.
ASSUMED_TOKEN_NS = 50_000.0
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(slots=True, eq=False)
class HostState:
    """A host, its number in the fleet, and what was seen of it last.

    `kind`: the same for hosts with equal configurations.

    `is_open`: a row, blocks and tokens of the next step are free; `is_open_soon`: the first two.
    `ahead_ns`: what it computes before the first token of whoever comes now, and beside.
    `num_pending_tokens`: of prompts, yet to be computed. `num_blank_blocks`: free ones that hold
    nothing.
    `token_ns`: what a token of a prompt takes, `is_measured` if that is known.
    """

    host: Engine
    number: int
    kind: int
    is_open: bool = False
    is_open_soon: bool = False
    ahead_ns: float = 0.0
    num_pending_tokens: int = 0
    num_free_rows: int = 0
    num_free_blocks: int = 0
    num_blank_blocks: int = 0
    token_ns: float = ASSUMED_TOKEN_NS
    is_measured: bool = False
    block_ns: float = 0.0
    block_size: int = 1

    @property
    def salt(self) -> int:
        """Its own number, far from those of others."""
        return self.number * _STRIDE

    def look(self, usual_token_ns: float) -> None:
        """Sees how the host is now; `usual_token_ns`: what a token takes at others."""
        host = self.host
        device, _ = host.pools
        self.num_pending_tokens = num_pending = host.num_pending_tokens
        self.num_free_rows = host.num_free_rows
        self.is_open_soon = host.has_room
        self.is_open = self.is_open_soon and num_pending < host.config.max_num_batched_tokens
        self.num_free_blocks = device.num_free
        self.num_blank_blocks = device.num_blank
        token_ns = host.recompute_ns(_NUM_MEASURED) / _NUM_MEASURED
        self.is_measured = token_ns > 0
        self.token_ns = token_ns or usual_token_ns
        self.block_ns = host.move_ns(_NUM_MEASURED) / _NUM_MEASURED
        self.block_size = host.config.block_size
        self.ahead_ns = self.token_ns * (num_pending + _ROW_TOKENS * host.num_running)

    def expect(self, num_rows: int, num_tokens: int) -> None:
        """Counts a request that begins there in a moment: its rows, and tokens to be computed."""
        num_blocks = -(-num_tokens // self.block_size)
        self.ahead_ns += self.token_ns * num_tokens
        self.num_pending_tokens += num_tokens
        self.num_free_rows -= num_rows
        self.num_free_blocks -= num_blocks
        self.num_blank_blocks = max(0, self.num_blank_blocks - num_blocks)
        self.is_open_soon &= self.num_free_rows > 0 and self.num_free_blocks > 0
        has_tokens = self.num_pending_tokens < self.host.config.max_num_batched_tokens
        self.is_open = self.is_open_soon and self.is_open and has_tokens
