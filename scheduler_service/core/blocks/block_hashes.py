"""Names of blocks by what they hold: hashes chained from block to block.

A block's keys and values depend on all tokens before it, on the model, on the adapter and, for
encoder-decoder models, on the encoder's input. Tenant and cache salt keep apart who may not learn
of each other. Each is hashed as a field of its own, so that no two different contexts have the same
name. BLAKE2b: more collision resistant than SHA-256, and not slow on processors without
instructions for that; a parent and 16 tokens are one of its input blocks.
"""

from __future__ import annotations

from hashlib import blake2b

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Int32Array, Request

_LENGTH_BYTES = 8


def root_hash(config: SchedulerConfig, request: Request) -> bytes:
    """The parent of the first block: everything but tokens that tells contexts apart."""
    encoder, scheduling = request.encoder_token_ids, request.scheduling
    fields = (
        config.model_digest.encode(),
        scheduling.tenant.encode() if config.separates_tenants else b"",
        scheduling.adapter.encode(),
        scheduling.cache_salt.encode(),
        b"" if encoder is None else encoder.tobytes(),
    )
    root = blake2b(person=b"root")
    for content in fields:
        root.update(len(content).to_bytes(_LENGTH_BYTES, "little"))
        root.update(content)
    return root.digest()


def extend_chain(
    chain: list[bytes], token_ids: Int32Array, num_blocks: int, block_size: int
) -> None:
    """Extends `chain`, which begins with a root hash, to the first `num_blocks` blocks.

    `token_ids`: [T] int32, T >= num_blocks * block_size. Afterwards `chain[i + 1]` names block i.
    """
    num_known = len(chain) - 1
    if num_known >= num_blocks:
        return
    data = token_ids[num_known * block_size : num_blocks * block_size].tobytes()
    parent, step = chain[-1], block_size * token_ids.itemsize
    for start in range(0, len(data), step):
        parent = hash_block(parent, data[start : start + step])
        chain.append(parent)


def hash_block(parent: bytes, token_data: bytes) -> bytes:
    """The name of the block that holds `token_data` after the block named `parent`."""
    return blake2b(parent + token_data).digest()
