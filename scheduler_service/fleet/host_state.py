"""State of one engine as the router sees it, read once for many comparisons.

Reading it costs more than comparing, and an engine changes only when it plans or applies a step or
loses a request. So it is read anew after such a change, and requests are compared with the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.engine import Engine

# Times are those of so many tokens or blocks, so that little is lost by whole nanoseconds.
_NUM_MEASURED = 1000
# A request that begins shares its steps with every row there for a while: so many tokens of each.
_ROW_TOKENS = 16
# Time of a token while no step of any executor was measured.
ASSUMED_TOKEN_NS = 50_000.0
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(slots=True, eq=False)
class HostState:
    """An engine, its number among those that take requests, and its state at the latest `look`.

    `kind`: the same for engines with equal configurations. `is_open_soon`: a row and blocks are
    free; `is_open`: tokens of the next step are, too. `ahead_ns`: time of what is computed before,
    or together with, the prompt of a request that begins now. `num_blank_blocks`: free blocks
    without contents. `token_ns`: time of a prompt token, `is_measured` if it is known. `block_ns`:
    time of bringing a block from the host pool. `num_pending_tokens`: of prompts, to be computed.
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
        """A number derived from `number`, far from those of other engines."""
        return self.number * _STRIDE

    def look(self, usual_token_ns: float) -> None:
        """Reads the state of the engine; `usual_token_ns`: time of a token at other engines."""
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
