"""Block tables: allocate, extend, fork, swap, release.

Freed blocks wait for the steps in flight that may still write them. Block moves become part of the
`draft` of the next step.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum

import numpy as np

from scheduler_service.scheduler.engine.blocks.block_pool import BlockPool
from scheduler_service.scheduler.engine.blocks.prefix_cache import PrefixCache, PrefixHit
from scheduler_service.scheduler.engine.row_columns import NO_STAY, RELEASED, RowColumns
from scheduler_service.scheduler.engine.step_draft import StepDraft
from scheduler_service.scheduler.values import (
    Int32Array,
    Int64Array,
    Request,
    SchedulerConfig,
    Sequence,
    SequenceStatus,
)

WATERMARK_RATIO = 0.01


class Allocation(Enum):
    """Result of `BlockManager.can_allocate`: blocks are free now, later, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockManager:
    """Hands the blocks of one executor's device and host pools to sequences.

    Source: Kwon 2023, sections 4.2 to 4.5; the watermark is that of vLLM's first block manager.
    """

    def __init__(self, config: SchedulerConfig, rows: RowColumns) -> None:
        self._config = config
        self._rows = rows
        self._block_size = config.block_size
        self.host = BlockPool(config.num_host_blocks)
        uses_host = config.prefix_caching and config.host_prefix_cache
        self.device = (
            BlockPool(config.num_device_blocks, self._demote)
            if uses_host and config.num_host_blocks
            else BlockPool(config.num_device_blocks)
        )
        self.prefixes = PrefixCache(config, self.device, self.host)
        self.watermark = int(config.num_device_blocks * WATERMARK_RATIO)
        self.draft = StepDraft()
        # Blocks that steps in flight may write, with the last of these steps.
        self.deferred: deque[tuple[int, list[int]]] = deque()

    # -- capacity ------------------------------------------------------------------------------

    @property
    def num_deferred(self) -> int:
        """Number of block references dropped when steps in flight are answered."""
        return sum(len(blocks) for _, blocks in self.deferred)

    @property
    def num_only_deferred(self) -> int:
        """Number of blocks that become free when the steps in flight are answered."""
        references = Counter(block for _, blocks in self.deferred for block in blocks)
        return sum(self.device.reference_count(b) == n for b, n in references.items())

    @property
    def has_pinned(self) -> bool:
        """Whether moves of the step being planned pin device blocks until it is planned."""
        return bool(self.draft.pinned_device_blocks)

    def can_allocate(
        self, sequence: Sequence, hit: PrefixHit, *, others_run: bool, num_more_blocks: int = 0
    ) -> Allocation:
        """Returns whether all known tokens of `sequence` and `num_more_blocks` blocks fit now.

        `hit`: prefix of the sequence that exists already. While other requests run, a watermark of
        blocks is left to them, so that the next preemption does not undo the admission.
        """
        reserve = self.watermark if others_run else 0
        lacking = self.num_lacking(sequence, hit) + num_more_blocks + reserve
        if lacking <= 0:
            return Allocation.OK
        needed = (
            self._num_table_blocks(sequence, hit.num_tokens) - hit.first_index + num_more_blocks
        )
        return Allocation.NEVER if needed > self.device.num_blocks else Allocation.LATER

    def num_lacking(self, sequence: Sequence, hit: PrefixHit) -> int:
        """Returns the blocks to be freed for `sequence`; negative if more than enough are free."""
        needed = self._num_table_blocks(sequence, hit.num_tokens) - hit.first_index
        num_in_use = self.device.num_referenced(hit.device_blocks)
        return needed - num_in_use - self.device.num_free

    def _num_table_blocks(self, sequence: Sequence, num_computed: int) -> int:
        """Returns the initial length of a block table: all known tokens, or a window of them."""
        num_tokens = len(sequence.token_ids)
        if self._config.sliding_window is not None:
            reach = max(num_computed, self._config.sliding_window) + self._block_size
            num_tokens = min(num_tokens, reach)
        return self._config.num_blocks_for(num_tokens)

    # -- tables of rows ------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Fills the table of a sequence's new row with the blocks of `hit` and fresh blocks."""
        num_blocks = self._num_table_blocks(sequence, hit.num_tokens)
        host_blocks = hit.host_blocks
        self.device.share(hit.device_blocks)
        num_fresh = num_blocks - hit.first_index - len(hit.blocks)
        if host_blocks:
            self._pin_host(host_blocks)
        fresh = self.device.allocate(num_fresh + len(host_blocks))
        found = self._promote(sequence, hit, fresh) if host_blocks else list(hit.blocks)
        table = [RELEASED] * hit.first_index + found
        self._rows.extend_table(sequence.row_id, table + fresh)
        self._rows.num_released[sequence.row_id] = hit.first_index

    def _promote(self, sequence: Sequence, hit: PrefixHit, fresh: list[int]) -> list[int]:
        """Returns device blocks for `hit`; swaps host blocks into blocks taken from `fresh`."""
        blocks = list(hit.blocks)
        for position, block in enumerate(blocks):
            if block < 0:
                blocks[position] = fresh.pop()
                block_hash = sequence.block_hashes[hit.first_index + position + 1]
                self._bring_in(~block, blocks[position], block_hash)
        return blocks

    def _bring_in(self, host_block: int, block: int, block_hash: bytes) -> None:
        """Copies a cached host block, which is pinned, to a device block, and publishes that."""
        self.draft.moves.swap_in.append((host_block, block))
        self._pin_device([block])
        if self.device.publish(block, block_hash):
            self.draft.published.setdefault(NO_STAY, []).append(block)

    def extend(self, row_id: int, num_blocks: int) -> list[int]:
        """Appends `num_blocks` fresh blocks to the table of a row; that many must be free."""
        blocks = self.device.allocate(num_blocks)
        self._rows.extend_table(row_id, blocks)
        return blocks

    def fork(self, source_row_id: int, sequence: Sequence, num_shared: int) -> None:
        """Fills the table of a sequence's new row, sharing `num_shared` tokens with a source row.

        Full blocks are shared. The source's part of the block after them is copied, because the
        sequence is about to write into that block (copy-on-write). So the block of a prompt's last
        token is copied even if it is full: each sequence computes that token, and two rows never
        write one slot.
        """
        rows, row_id = self._rows, sequence.row_id
        num_full = num_shared // self._block_size
        table: list[int] = rows.block_table(source_row_id).tolist()
        num_released = min(int(rows.num_released[source_row_id]), num_full)
        self.device.share(table[num_released:num_full])
        fresh = self.device.allocate(self.num_fork_blocks(sequence, num_shared))
        if num_shared % self._block_size:
            self.draft.moves.copy.append((table[num_full], fresh[0]))
            self._pin_device([table[num_full], fresh[0]])
        rows.extend_table(row_id, table[:num_full] + fresh)
        rows.num_released[row_id] = num_released

    def num_fork_blocks(self, sequence: Sequence, num_shared: int) -> int:
        """Returns the number of blocks that `fork` takes from the pool."""
        return self._num_table_blocks(sequence, num_shared) - num_shared // self._block_size

    def release(self, row_id: int, last_answered_step_id: int) -> None:
        """Frees the blocks of a row as soon as no step in flight may write them."""
        blocks = self._rows.held_blocks(row_id)
        self.free_after(int(self._rows.last_step_id[row_id]), blocks, last_answered_step_id)

    def release_behind_windows(
        self, row_ids: Int64Array, ends: Int32Array, last_answered_step_id: int
    ) -> list[int]:
        """Frees the blocks before `ends` in tables of rows, once no step in flight writes them.

        Returns the blocks, row by row.
        """
        rows = self._rows
        starts, steps = rows.num_released[row_ids], rows.last_step_id[row_ids]
        blocks = rows.release_blocks(row_ids, ends)
        for step_id in sorted(set(steps.tolist())):
            of_step = blocks[np.repeat(steps == step_id, ends - starts)]
            self.free_after(step_id, of_step.tolist(), last_answered_step_id)
        released: list[int] = blocks.tolist()
        return released

    def free_after(self, step_id: int, blocks: list[int], last_answered_step_id: int) -> None:
        """Frees device blocks now, or when `step_id`, which may write them, is answered."""
        if step_id <= last_answered_step_id:
            self.device.free(blocks)
        elif blocks:
            self.deferred.append((step_id, blocks))

    def step_answered(self, step_id: int) -> None:
        """Frees the blocks that waited for `step_id`. Steps are answered in order."""
        if not self.deferred:
            return
        still_waiting = deque[tuple[int, list[int]]]()
        for waits_for, blocks in self.deferred:
            if waits_for <= step_id:
                self.device.free(blocks)
            else:
                still_waiting.append((waits_for, blocks))
        self.deferred = still_waiting

    # -- the encoder's blocks ------------------------------------------------------------------

    def num_cross_blocks(self, request: Request) -> int:
        """Returns the blocks to be freed for the encoder's keys and values of a request."""
        if not request.num_encoder_tokens or request.cross_blocks:
            return 0
        num_blocks = self._config.num_blocks_for(request.num_encoder_tokens)
        found = self.prefixes.find_encoded(request)
        return num_blocks - self.device.num_referenced([block for block in found if block >= 0])

    def num_to_encode(self, request: Request) -> int:
        """Returns the encoder tokens that a request without rows would have to encode."""
        if request.cross_blocks or self.prefixes.find_encoded(request):
            return 0
        return request.num_encoder_tokens

    def find_cross(self, request: Request) -> None:
        """Takes a request's cross blocks from the prefix cache, provided that it has all of them.

        Call it before anything else is allocated for the request, and `allocate_cross` afterwards.
        """
        if not request.num_encoder_tokens or request.cross_blocks:
            return
        request.cross_blocks = found = self.prefixes.find_encoded(request)
        request.is_encoded = bool(found)
        self.device.share([block for block in found if block >= 0])
        self._pin_host([~block for block in found if block < 0])

    def allocate_cross(self, request: Request) -> None:
        """Allocates the cross blocks that `find_cross` did not find on the device."""
        if not request.num_encoder_tokens:
            return
        if not request.cross_blocks:
            num_blocks = self._config.num_blocks_for(request.num_encoder_tokens)
            request.cross_blocks = self.device.allocate(num_blocks)
        hashes = self.prefixes.encoder_hashes(request)
        for index, block in enumerate(request.cross_blocks):
            if block < 0:
                [request.cross_blocks[index]] = self.device.allocate(1)
                self._bring_in(~block, request.cross_blocks[index], hashes[index])

    def publish_cross(self, request: Request, stay_id: int) -> None:
        """Makes the cross blocks of a request findable, which the step being planned fills.

        `stay_id`: of the row with which they are filled.
        """
        hashes = self.prefixes.encoder_hashes(request)
        for block, block_hash in zip(request.cross_blocks, hashes, strict=False):
            if self.device.publish(block, block_hash):
                self.draft.published.setdefault(stay_id, []).append(block)

    def release_cross(self, request: Request, last_step_id: int, last_answered: int) -> None:
        """Frees the blocks of a request's encoder after `last_step_id`; their contents are lost."""
        blocks, request.cross_blocks, request.is_encoded = request.cross_blocks, [], False
        self.free_after(last_step_id, blocks, last_answered)

    # -- swap ----------------------------------------------------------------------------------

    def can_swap_out(self, request: Request) -> bool:
        """Returns whether the host pool has room for all blocks of a running request."""
        return len(self.blocks_of(request)) <= self.host.num_free

    def blocks_of(self, request: Request) -> set[int]:
        """Returns the device blocks of a running request; a shared block is contained once."""
        blocks = set(request.cross_blocks)
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                blocks.update(self._rows.held_blocks(sequence.row_id))
        return blocks

    def swap_out(self, request: Request) -> None:
        """Copies all blocks of a running request to the host; its rows keep theirs until released.

        Blocks that its sequences share are moved once.
        """
        on_device = sorted(self.blocks_of(request))
        to_host = dict(zip(on_device, self.host.allocate(len(on_device)), strict=True))
        self.draft.moves.swap_out += to_host.items()
        tables = []
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                table: list[int] = self._rows.block_table(sequence.row_id).tolist()
                sequence.host_table = [to_host.get(block, RELEASED) for block in table]
                sequence.num_computed = int(self._rows.num_computed[sequence.row_id])
                tables.append(sequence.host_table)
        request.host_cross_blocks = [to_host[block] for block in request.cross_blocks]
        tables.append(request.host_cross_blocks)
        # The allocation counts as the first reference of each block.
        self._share_again(self.host, tables)

    def num_swap_in_blocks(self, request: Request) -> int:
        """Returns the number of device blocks that `swap_in` takes."""
        return len(_distinct(_host_tables(request)))

    def swap_in(self, request: Request) -> None:
        """Fills the tables of a swapped request's new rows; releases its host blocks."""
        host_blocks = sorted(_distinct(_host_tables(request)))
        to_device = dict(zip(host_blocks, self.device.allocate(len(host_blocks)), strict=True))
        self.draft.moves.swap_in += to_device.items()
        self._pin_host(host_blocks)
        self._pin_device(list(to_device.values()))
        tables = []
        for sequence in request.sequences:
            if sequence.host_table:
                table = [to_device.get(block, RELEASED) for block in sequence.host_table]
                self._rows.extend_table(sequence.row_id, table)
                self._rows.num_released[sequence.row_id] = table.count(RELEASED)
                tables.append(table)
        request.cross_blocks = [to_device[block] for block in request.host_cross_blocks]
        tables.append(request.cross_blocks)
        self._share_again(self.device, tables)
        self.drop_swapped(request)

    def drop_swapped(self, request: Request) -> None:
        """Frees the host blocks of a request."""
        for sequence in request.sequences:
            self.drop_host_table(sequence)
        self.host.free(request.host_cross_blocks)
        request.host_cross_blocks = []

    def drop_host_table(self, sequence: Sequence) -> None:
        """Frees the host blocks of a sequence."""
        self.host.free([block for block in sequence.host_table if block != RELEASED])
        sequence.host_table = []

    # -- the step being planned ----------------------------------------------------------------

    def take_draft(self) -> StepDraft:
        """Returns the draft, which is now planned as a step, and begins another draft.

        Until then, sources and destinations of its moves are pinned and not given to other
        sequences.
        """
        draft, self.draft = self.draft, StepDraft()
        if draft.moves:
            self.device.free(draft.pinned_device_blocks)
            self.host.free(draft.pinned_host_blocks)
        return draft

    def _demote(self, block_id: int, block_hash: bytes) -> None:
        """Copies a published device block that is about to be reused to the host pool.

        Does nothing if the host pool is full or has a block with the same contents.
        """
        if self.host.num_free == 0 or self.host.find(block_hash) is not None:
            return
        host_block = self.host.allocate(1)
        self.host.publish(host_block[0], block_hash)
        self.draft.moves.swap_out.append((block_id, host_block[0]))
        self.draft.pinned_host_blocks += host_block

    def _pin_device(self, blocks: list[int]) -> None:
        self.device.share(blocks)
        self.draft.pinned_device_blocks += blocks

    def _pin_host(self, blocks: list[int]) -> None:
        self.host.share(blocks)
        self.draft.pinned_host_blocks += blocks

    def _share_again(self, pool: BlockPool, tables: list[list[int]]) -> None:
        seen: set[int] = set()
        for table in tables:
            blocks = [block for block in table if block != RELEASED]
            pool.share([block for block in blocks if block in seen])
            seen.update(blocks)


def _host_tables(request: Request) -> list[list[int]]:
    return [sequence.host_table for sequence in request.sequences] + [request.host_cross_blocks]


def _distinct(tables: list[list[int]]) -> set[int]:
    return {block for table in tables for block in table if block != RELEASED}
