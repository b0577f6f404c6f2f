"""Names of blocks by what they hold: hashes chained from block to block.

A block's keys and values depend on all tokens before it, on the model, on the adapter and, for
encoder-decoder models, on the encoder's input. Tenant and cache salt keep apart who may not learn
of each other. Each is hashed as a field of its own, so that no two different contexts have the same
name. Blocks that lie wholly within what a request says is public are named without its tenant; the
tenant is mixed in before the first block after them, so whatever follows is its own.

BLAKE2b: more collision resistant than SHA-256, and not slow on processors without instructions for
that; a parent and 16 tokens are one of its input blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Int32Array, Request

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Boundary:
    """The blocks before `num_public` are named without the tenant; `tenant` is mixed in there."""

    num_public: int = 0
    tenant: bytes = b""

    def parent(self, chain: list[bytes]) -> bytes:
        """What the next block of `chain` is named after."""
        if not self.num_public or len(chain) - 1 != self.num_public:
            return chain[-1]
        return blake2b(chain[-1] + self.tenant, person=b"tenant").digest()


ALL_PRIVATE = Boundary()


def boundary_of(config: SchedulerConfig, request: Request) -> Boundary:
    """Where the blocks of a request begin to be its tenant's own.

    What is put into the encoder comes before every token of the prompt and is nobody else's
    business, so beside it nothing is public.
    """
    scheduling = request.scheduling
    if not scheduling.num_public_prefix_tokens or not config.separates_tenants:
        return ALL_PRIVATE
    if request.encoder_token_ids is not None:
        return ALL_PRIVATE
    num_tokens = min(scheduling.num_public_prefix_tokens, request.sequence.num_prompt_tokens)
    return Boundary(num_tokens // config.block_size, scheduling.tenant.encode())


def root_hash(config: SchedulerConfig, request: Request) -> bytes:
    """The parent of the first block: everything but tokens that tells contexts apart.

    The size of blocks is no part of a context, but chains of other sizes are no use to each other.

    That of a public block is told apart from that of the tenant without a name.
    """
    encoder, scheduling = request.encoder_token_ids, request.scheduling
    is_public = boundary_of(config, request).num_public > 0
    is_separate = config.separates_tenants and not is_public
    fields = (
        config.model_digest.encode(),
        config.block_size.to_bytes(_LENGTH_BYTES, "little"),
        scheduling.tenant.encode() if is_separate else b"",
        scheduling.adapter.encode(),
        scheduling.cache_salt.encode(),
        b"" if encoder is None else encoder.tobytes(),
    )
    parts = [len(content).to_bytes(_LENGTH_BYTES, "little") + content for content in fields]
    return blake2b(b"".join(parts), person=b"public" if is_public else b"root").digest()


def extend_chain(
    chain: list[bytes],
    token_ids: Int32Array,
    num_blocks: int,
    block_size: int,
    boundary: Boundary = ALL_PRIVATE,
) -> None:
    """Extends `chain`, which begins with a root hash, to the first `num_blocks` blocks.

    `token_ids`: [T] int32, T >= num_blocks * block_size. Afterwards `chain[i + 1]` names block i.
    """
    num_known = len(chain) - 1
    if num_known >= num_blocks:
        return
    data = token_ids[num_known * block_size : num_blocks * block_size].tobytes()
    parent, step = boundary.parent(chain), block_size * token_ids.itemsize
    for index, start in enumerate(range(0, len(data), step), num_known + 1):
        parent = hash_block(parent, data[start : start + step])
        chain.append(parent)
        if index == boundary.num_public:
            parent = boundary.parent(chain)


def grow_chain(
    chain: list[bytes],
    config: SchedulerConfig,
    request: Request,
    token_ids: Int32Array,
    num_blocks: int,
) -> None:
    """Extends the chain of a request, which may be empty, to its root and `num_blocks` blocks."""
    if not chain:
        chain.append(root_hash(config, request))
    if len(chain) <= num_blocks:
        boundary = boundary_of(config, request)
        extend_chain(chain, token_ids, num_blocks, config.block_size, boundary)


def hash_block(parent: bytes, token_data: bytes) -> bytes:
    """The name of the block that holds `token_data` after the block named `parent`."""
    return blake2b(parent + token_data).digest()
