"""Names of blocks that many prompts begin with, so that only the first of them is hashed.

What is remembered by is a hash of the tokens, not the tokens: nothing of a prompt stays here.
"""

from __future__ import annotations

from hashlib import blake2b

from scheduler_service.core.blocks.block_hashes import (
    Boundary,
    boundary_of,
    extend_chain,
    root_hash,
)
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Int32Array, Request

# Names are remembered together that follow each other.
RUN_BLOCKS = 32
# Runs; with a name of 64 bytes about 7 MiB.
MAX_RUNS = 2048


class RememberedNames:
    """Runs of names, the one that was used least recently first."""

    def __init__(self) -> None:
        self._runs: dict[bytes, list[bytes]] = {}

    @property
    def num_runs(self) -> int:
        """How many are remembered."""
        return len(self._runs)

    def grow_chain(
        self,
        chain: list[bytes],
        config: SchedulerConfig,
        request: Request,
        token_ids: Int32Array,
        num_blocks: int,
    ) -> None:
        """Does what `block_hashes.grow_chain` does."""
        if not chain:
            chain.append(root_hash(config, request))
        if len(chain) > num_blocks:
            return
        boundary, block_size = boundary_of(config, request), config.block_size
        while (num_known := len(chain) - 1) < num_blocks:
            end = num_known - num_known % RUN_BLOCKS + RUN_BLOCKS
            if end > num_blocks or end - num_known < RUN_BLOCKS:
                extend_chain(chain, token_ids, min(end, num_blocks), block_size, boundary)
                continue
            key = _key(chain, token_ids[num_known * block_size : end * block_size], boundary)
            run = self._runs.pop(key, None)
            if run is None:
                extend_chain(chain, token_ids, end, block_size, boundary)
                run = chain[num_known + 1 :]
                if len(self._runs) >= MAX_RUNS:
                    del self._runs[next(iter(self._runs))]
            else:
                chain += run
            self._runs[key] = run


def _key(chain: list[bytes], token_ids: Int32Array, boundary: Boundary) -> bytes:
    """What the names of these blocks follow from; the size of blocks is in that of their parent."""
    key = blake2b(chain[-1], person=b"run")
    if boundary.num_public:
        # Where the tenant is mixed in, seen from here; what is known of that tenant stays its own.
        key.update(b"%d %d " % (boundary.num_public - len(chain), len(boundary.tenant)))
        key.update(boundary.tenant)
    key.update(token_ids.tobytes())
    return key.digest()
