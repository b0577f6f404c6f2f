"""KV blocks: block pools, block tables and the prefix cache."""

from scheduler_service.scheduler.engine.blocks.block_manager import Allocation, BlockManager
from scheduler_service.scheduler.engine.blocks.block_pool import BlockPool
from scheduler_service.scheduler.engine.blocks.prefix_cache import (
    NO_HIT,
    RUN_BLOCKS,
    PrefixCache,
    PrefixHit,
    PublicBoundary,
    RememberedNames,
    boundary_of,
    extend_chain,
    first_block_needed,
    hash_encoder_blocks,
    may_skip_prefix,
    num_findable_blocks,
    root_hash,
)

__all__ = [
    "NO_HIT",
    "RUN_BLOCKS",
    "Allocation",
    "BlockManager",
    "BlockPool",
    "PrefixCache",
    "PrefixHit",
    "PublicBoundary",
    "RememberedNames",
    "boundary_of",
    "extend_chain",
    "first_block_needed",
    "hash_encoder_blocks",
    "may_skip_prefix",
    "num_findable_blocks",
    "root_hash",
]
