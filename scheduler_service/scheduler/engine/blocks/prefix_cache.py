"""Prefix cache: finds and publishes blocks by hashes of their contents, on device and host."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from scheduler_service.scheduler.engine.blocks.block_pool import BlockPool
from scheduler_service.scheduler.engine.row_columns import RowColumns
from scheduler_service.scheduler.values import (
    Int32Array,
    Int64Array,
    Request,
    RequestStatus,
    SchedulerConfig,
    Sequence,
)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Prefix of a sequence whose KV exists: the first `num_tokens` tokens.

    `blocks`: the blocks from logical block `first_index` on; the blocks before lie behind the
    sliding window. Device block b is b, host block b is ~b, which is negative.
    """

    num_tokens: int = 0
    first_index: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def device_blocks(self) -> Items[int]:
        """Device blocks of the hit."""
        if not self._has_host_blocks:
            return self.blocks
        return [block for block in self.blocks if block >= 0]

    @property
    def host_blocks(self) -> list[int]:
        """Host blocks of the hit, for blocks that only the host pool has."""
        return [~block for block in self.blocks if block < 0] if self._has_host_blocks else []

    @property
    def _has_host_blocks(self) -> bool:
        return min(self.blocks, default=0) < 0


NO_HIT = PrefixHit()


class PrefixCache:
    """Finds and publishes blocks by their contents, in the device pool and the host pool."""

    def __init__(self, config: SchedulerConfig, device: BlockPool, host: BlockPool) -> None:
        self._config = config
        self._device = device
        self._host = host
        self._names = RememberedNames()

    def find(self, sequence: Sequence) -> PrefixHit:
        """Returns the longest prefix of a sequence that exists, at least one token short of all."""
        if not may_skip_prefix(self._config, sequence):
            return NO_HIT
        block_size = self._config.block_size
        num_blocks = num_findable_blocks(self._config, sequence)
        hashes = self.chain(sequence, sequence.token_ids, num_blocks)[1 : num_blocks + 1]
        if self._config.sliding_window is None:
            blocks = self._find_run(hashes)
            return PrefixHit(len(blocks) * block_size, 0, tuple(blocks))
        end, blocks = self._find_window(hashes)
        return PrefixHit(end * block_size, end - len(blocks), tuple(blocks))

    def find_encoded(self, request: Request) -> list[int]:
        """Returns the cross blocks of a request if all of them exist, as in a PrefixHit."""
        blocks = []
        for block_hash in self.encoder_hashes(request):
            block = self._find_block(block_hash)
            if block is None:
                return []
            blocks.append(block)
        return blocks

    def encoder_hashes(self, request: Request) -> list[bytes]:
        """Returns the hashes of the cross blocks of a request; none if they cannot be found.

        Sets `request.encoder_hashes`.
        """
        if not request.encoder_hashes and _uses_cache(self._config, request.sequence):
            request.encoder_hashes = hash_encoder_blocks(self._config, request)
        return request.encoder_hashes

    def adopt(self, sequence: Sequence) -> None:
        """Reuses block hashes that other engines of the same hash kind computed for a sequence.

        Asserts that no engine has the request.
        """
        status = sequence.request.status
        assert status in (RequestStatus.ABSENT, RequestStatus.WAITING), (
            "the request is in another engine"
        )
        sequence.block_hashes = sequence.chains.setdefault(self._config.hash_kind, [])

    def publish(
        self, sequence: Sequence, token_ids: Int32Array, block_ids: list[int], first_index: int
    ) -> list[int]:
        """Makes full blocks of a sequence findable, from logical block `first_index` on.

        `token_ids`: its tokens, at least to the end of the last of these blocks. Returns the blocks
        that became findable. Skips released blocks (-1).
        """
        if not self.is_used_by(sequence):
            return []
        hashes = self.chain(sequence, token_ids, first_index + len(block_ids))
        publish = self._device.publish
        return [
            block_id
            for index, block_id in enumerate(block_ids, first_index + 1)
            if block_id >= 0 and publish(block_id, hashes[index])
        ]

    def publish_rows(self, rows: RowColumns, row_ids: Int64Array, indexes: Int64Array) -> None:
        """Makes one block of each row findable: table index `indexes[i]` of row `row_ids[i]`.

        The tokens of these blocks must be known. For a released block only the hash is kept, as the
        parent of later blocks.
        """
        chains, publish = rows.chains, self._device.publish
        # An item is read faster than many, unless there are hundreds.
        block_at, tokens_at = rows.block_tables.item, rows.block_tokens
        for row_id, index in zip(row_ids.tolist(), indexes.tolist(), strict=True):
            chain, block_id = chains[row_id], block_at(row_id, index)
            if len(chain) == index + 1:
                block_hash = hash_block(chain[index], tokens_at(row_id, index))
                chain.append(block_hash)
                if block_id >= 0:
                    publish(block_id, block_hash)
            else:
                # The chain is not a simple one, or was not extended while the sequence had no row.
                self.publish(rows.sequence(row_id), rows.known_tokens(row_id), [block_id], index)

    def chain(self, sequence: Sequence, token_ids: Int32Array, num_blocks: int) -> list[bytes]:
        """Returns the hash chain of a sequence: root hash, then `num_blocks` or more block hashes.

        Extends `sequence.block_hashes`.
        """
        chain = sequence.block_hashes
        self._names.grow_chain(chain, self._config, sequence.request, token_ids, num_blocks)
        return chain

    def is_used_by(self, sequence: Sequence) -> bool:
        """Returns whether the blocks of a sequence are to be findable."""
        return _uses_cache(self._config, sequence)

    def _find_run(self, hashes: list[bytes]) -> list[int]:
        """Returns the blocks of the leading hashes, up to the first that is in neither pool."""
        blocks = self._device.find_run(hashes)
        for block_hash in islice(hashes, len(blocks), None):
            block = self._find_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _find_window(self, hashes: list[bytes]) -> tuple[int, list[int]]:
        """Returns the largest end, in blocks, of a whole cached window, and the window's blocks."""
        end = len(hashes)
        index = end - 1
        blocks: list[int] = []
        while index >= self.first_block_needed(end * self._config.block_size):
            block = self._find_block(hashes[index])
            if block is None:
                end = index
                blocks.clear()
            else:
                blocks.append(block)
            index -= 1
        return end, blocks[::-1]

    def _find_block(self, block_hash: bytes) -> int | None:
        block = self._device.find(block_hash)
        if block is None:
            block = self._host.find(block_hash)
            if block is not None:
                return ~block
        return block

    def first_block_needed(self, num_computed: int) -> int:
        """Returns the first logical block that a token at position `num_computed` attends to."""
        return first_block_needed(self._config, num_computed)


def may_skip_prefix(config: SchedulerConfig, sequence: Sequence) -> bool:
    """Returns whether a sequence may begin behind a cached prefix."""
    # Logprobs of prompt tokens exist only if the tokens are computed.
    request = sequence.request
    wants_all = (
        request.params.num_prompt_logprobs is not None
        and request.num_prompt_logprobs_sent < sequence.num_prompt_tokens - 1
    )
    return _uses_cache(config, sequence) and not wants_all


def num_findable_blocks(config: SchedulerConfig, sequence: Sequence) -> int:
    """Returns how many blocks of a sequence without a row are worth finding.

    The block of its last token is not: that token must be computed.
    """
    return (len(sequence.token_ids) - 1) // config.block_size


def first_block_needed(config: SchedulerConfig, num_computed: int) -> int:
    """Returns the first logical block that a token at position `num_computed` attends to."""
    window = config.sliding_window
    return 0 if window is None else max(0, num_computed - window + 1) // config.block_size


def _uses_cache(config: SchedulerConfig, sequence: Sequence) -> bool:
    return config.prefix_caching and sequence.request.scheduling.uses_prefix_cache


# -- Block hashes ----------------------------------------------------------------------------------
#
# Block hashes are chained. The keys and values of a block depend on all tokens before it, on the
# model, on the adapter and, for encoder-decoder models, on the encoder's input. Tenant and cache
# salt separate callers that must not learn of each other. Each of these is hashed as a field of its
# own, so that two different contexts never have the same hash. Blocks wholly within the public
# prefix of a request are hashed without its tenant. The tenant is mixed in before the first block
# behind the prefix, so all later blocks are the tenant's own.
#
# BLAKE2b resists collisions better than SHA-256, and is not slow on processors without SHA
# instructions; a parent and 16 tokens fill one of its input blocks.

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class PublicBoundary:
    """End of the public blocks of a request.

    The first `num_public` blocks are hashed without the tenant; `tenant` is mixed in behind them.
    """

    num_public: int = 0
    tenant: bytes = b""

    def parent(self, chain: list[bytes]) -> bytes:
        """Returns the parent hash of the next block of `chain`."""
        if not self.num_public or len(chain) - 1 != self.num_public:
            return chain[-1]
        return blake2b(chain[-1] + self.tenant, person=b"tenant").digest()


ALL_PRIVATE = PublicBoundary()


def boundary_of(config: SchedulerConfig, request: Request) -> PublicBoundary:
    """Returns where the blocks of a request begin to be its tenant's own.

    The encoder's input precedes every token of the prompt and is private, so a request with encoder
    input has no public blocks.
    """
    scheduling = request.scheduling
    if not scheduling.num_public_prefix_tokens or not config.separates_tenants:
        return ALL_PRIVATE
    if request.num_encoder_tokens:
        return ALL_PRIVATE
    num_tokens = min(scheduling.num_public_prefix_tokens, request.sequence.num_prompt_tokens)
    return PublicBoundary(num_tokens // config.block_size, scheduling.tenant.encode())


def root_hash(config: SchedulerConfig, request: Request) -> bytes:
    """Returns the parent hash of the first block: everything but tokens that separates contexts.

    Includes the block size, since chains of different block sizes are of no use to each other. The
    root of a public chain differs from that of the tenant without a name.
    """
    encoder, features = request.encoder_token_ids, request.encoder_features
    scheduling = request.scheduling
    is_public = boundary_of(config, request).num_public > 0
    is_separate = config.separates_tenants and not is_public
    fields = (
        config.model_digest.encode(),
        config.block_size.to_bytes(_LENGTH_BYTES, "little"),
        scheduling.tenant.encode() if is_separate else b"",
        scheduling.adapter.encode(),
        scheduling.cache_salt.encode(),
        b"" if encoder is None else encoder.tobytes(),
        *([] if features is None else [features.digest]),
    )
    parts = [len(content).to_bytes(_LENGTH_BYTES, "little") + content for content in fields]
    return blake2b(b"".join(parts), person=b"public" if is_public else b"root").digest()


def hash_encoder_blocks(config: SchedulerConfig, request: Request) -> list[bytes]:
    """Returns the hashes of the cross blocks of a request, by all of its encoder's input."""
    if not request.num_encoder_tokens:
        return []
    root = root_hash(config, request)
    numbers = range(config.num_blocks_for(request.num_encoder_tokens))
    return [
        blake2b(root + number.to_bytes(_LENGTH_BYTES, "little"), person=b"encoder").digest()
        for number in numbers
    ]


def extend_chain(
    chain: list[bytes],
    token_ids: Int32Array,
    num_blocks: int,
    block_size: int,
    boundary: PublicBoundary = ALL_PRIVATE,
) -> None:
    """Extends `chain`, which begins with a root hash, to the first `num_blocks` blocks.

    `token_ids`: [T] int32, T >= num_blocks * block_size. Afterwards `chain[i + 1]` is the hash of
    block i.
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


def hash_block(parent: bytes, token_data: bytes) -> bytes:
    """Returns the hash of the block that holds `token_data` after the block `parent`."""
    return blake2b(parent + token_data).digest()


# -- Remembered block hashes, so that a common prefix is hashed once -------------------------------
#
# The key of a run is a hash of its tokens, not the tokens: no prompt content stays here.

# Number of consecutive blocks whose hashes are remembered together, as a run.
RUN_BLOCKS = 32
# Most runs; about 7 MiB with hashes of 64 bytes.
MAX_RUNS = 2048


class RememberedNames:
    """Runs of block hashes, least recently used first."""

    def __init__(self) -> None:
        self._runs: dict[bytes, list[bytes]] = {}

    @property
    def num_runs(self) -> int:
        """Number of remembered runs."""
        return len(self._runs)

    def grow_chain(
        self,
        chain: list[bytes],
        config: SchedulerConfig,
        request: Request,
        token_ids: Int32Array,
        num_blocks: int,
    ) -> None:
        """Extends the hash chain of a request, which may be empty, to its root and `num_blocks`.

        `token_ids`: [T] int32, T >= num_blocks * block_size.
        """
        if not chain:
            chain.append(root_hash(config, request))
        if len(chain) > num_blocks:
            return
        boundary, block_size = boundary_of(config, request), config.block_size
        assert len(token_ids) >= num_blocks * block_size, "the tokens of these blocks are known"
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


def _key(chain: list[bytes], token_ids: Int32Array, boundary: PublicBoundary) -> bytes:
    """Returns the key of a run: all that its hashes follow from.

    The parent hash covers the block size.
    """
    key = blake2b(chain[-1], person=b"run")
    if boundary.num_public:
        # Position at which the tenant is mixed into the hashes, relative to this run; keeps the
        # runs of different tenants apart.
        key.update(b"%d %d " % (boundary.num_public - len(chain), len(boundary.tenant)))
        key.update(boundary.tenant)
    key.update(token_ids.tobytes())
    return key.digest()
