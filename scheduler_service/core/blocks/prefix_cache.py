"""Which blocks of a sequence exist already, on the device or in the host pool."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from scheduler_service.core.blocks.block_hashes import (
    boundary_of,
    grow_chain,
    hash_block,
)
from scheduler_service.core.blocks.block_pool import BlockPool
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Int32Array, Int64Array, RequestStatus, Sequence
from scheduler_service.core.row_columns import RowColumns


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The KV of the first `num_tokens` tokens exists.

    `blocks` are those from logical block `first_index` on: the ones before lie behind the sliding
    window. Device block b is b, host block b is ~b, which is negative.
    """

    num_tokens: int = 0
    first_index: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def device_blocks(self) -> list[int]:
        """Those of the blocks that are on the device."""
        return [block for block in self.blocks if block >= 0]

    @property
    def host_blocks(self) -> list[int]:
        """Those of the blocks that are in the host pool only."""
        return [~block for block in self.blocks if block < 0]


NO_HIT = PrefixHit()


class PrefixCache:
    """Finds and publishes blocks by what they hold, in the device pool and the host pool."""

    def __init__(self, config: SchedulerConfig, device: BlockPool, host: BlockPool) -> None:
        self._config = config
        self._device = device
        self._host = host

    def find(self, sequence: Sequence) -> PrefixHit:
        """The longest prefix of a sequence that exists. At least one token stays to be computed."""
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

    def adopt(self, sequence: Sequence) -> None:
        """Reuses block hashes of a sequence of no engine, where this engine names blocks alike."""
        status = sequence.request.status
        assert status in (RequestStatus.ABSENT, RequestStatus.WAITING), (
            "its hashes are another engine's"
        )
        sequence.block_hashes = sequence.chains.setdefault(self._config.hash_kind, [])

    def publish(
        self, sequence: Sequence, token_ids: Int32Array, block_ids: list[int], first_index: int
    ) -> list[int]:
        """Makes full blocks of a sequence findable, from logical block `first_index` on.

        `token_ids`: its tokens, at least to the end of the last of these blocks. Returns those that
        are findable by this. Blocks that were released (-1) are left out.
        """
        if not self.is_used_by(sequence):
            return []
        hashes = self.chain(sequence, token_ids, first_index + len(block_ids))
        return [
            block_id
            for index, block_id in enumerate(block_ids, first_index + 1)
            if block_id >= 0 and self._device.publish(block_id, hashes[index])
        ]

    def publish_rows(self, rows: RowColumns, row_ids: Int64Array, indexes: Int64Array) -> None:
        """Makes one block of each row findable, `indexes` in its table. Its tokens are known.

        Of released blocks only the hash is kept, for those that follow.
        """
        block_size = self._config.block_size
        blocks = rows.block_tables[row_ids, indexes].tolist()
        # Mostly of few rows: slices take less time than one index of all.
        for row_id, index, block_id in zip(row_ids.tolist(), indexes.tolist(), blocks, strict=True):
            sequence = rows.sequence(row_id)
            if sequence.request.scheduling.uses_prefix_cache:
                chain = sequence.block_hashes
                if len(chain) <= index:
                    # The result of an earlier block came while the sequence had no row.
                    self.chain(sequence, rows.known_tokens(row_id), index)
                if len(chain) == index + 1:
                    parent = chain[index]
                    if sequence.request.scheduling.num_public_prefix_tokens:
                        parent = boundary_of(self._config, sequence.request).parent(chain)
                    start = index * block_size
                    tokens = rows.token_ids[row_id, start : start + block_size]
                    chain.append(hash_block(parent, tokens.tobytes()))
                if block_id >= 0:
                    self._device.publish(block_id, chain[index + 1])

    def chain(self, sequence: Sequence, token_ids: Int32Array, num_blocks: int) -> list[bytes]:
        """The hashes of a sequence: its root, and those of `num_blocks` blocks or more."""
        chain = sequence.block_hashes
        grow_chain(chain, self._config, sequence.request, token_ids, num_blocks)
        return chain

    def is_used_by(self, sequence: Sequence) -> bool:
        """Whether the blocks of a sequence are to be findable."""
        return _uses_cache(self._config, sequence)

    def _find_run(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the first hashes, up to one that is nowhere."""
        blocks = self._device.find_run(hashes)
        for block_hash in islice(hashes, len(blocks), None):
            block = self._find_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _find_window(self, hashes: list[bytes]) -> tuple[int, list[int]]:
        """The largest end, in blocks, before which the whole window is there, and the window."""
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
        """The first logical block that a token at position `num_computed` attends to."""
        return first_block_needed(self._config, num_computed)


def may_skip_prefix(config: SchedulerConfig, sequence: Sequence) -> bool:
    """Whether a sequence may begin behind a prefix that exists."""
    # Logprobs of prompt tokens come from computing them.
    request = sequence.request
    wants_all = (
        request.params.num_prompt_logprobs is not None
        and request.num_prompt_logprobs_sent < sequence.num_prompt_tokens - 1
    )
    return _uses_cache(config, sequence) and not wants_all


def num_findable_blocks(config: SchedulerConfig, sequence: Sequence) -> int:
    """How many blocks of a sequence without a row are of use: not that of its last token."""
    return (len(sequence.token_ids) - 1) // config.block_size


def first_block_needed(config: SchedulerConfig, num_computed: int) -> int:
    """The first logical block that a token at position `num_computed` attends to."""
    window = config.sliding_window
    return 0 if window is None else max(0, num_computed - window + 1) // config.block_size


def _uses_cache(config: SchedulerConfig, sequence: Sequence) -> bool:
    return config.prefix_caching and sequence.request.scheduling.uses_prefix_cache
