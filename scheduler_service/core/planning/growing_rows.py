"""Running requests get what they need to go on: blocks, and rows for sequences that join."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement import Placement
from scheduler_service.core.planning.held_shares import HeldShares
from scheduler_service.core.request import FinishReason, Int32Array, Int64Array, Request, Sequence
from scheduler_service.core.request import SequenceStatus as Status
from scheduler_service.core.row_columns import NO_STAY, ONE, ZERO
from scheduler_service.core.siblings import Siblings
from scheduler_service.core.tally import PreemptionCause

# Of the pool, one part in so many is left to others by rows that look ahead to run on.
_SHARE_KEPT_FREE = 8


class GrowingRows:
    """Keeps the rows of running requests supplied; where blocks lack, the least urgent yields."""

    def __init__(self, config: SchedulerConfig, placement: Placement, siblings: Siblings) -> None:
        self._config = config
        self._placement = placement
        self._siblings = siblings
        self._shares = HeldShares(config, placement)
        self._rows = placement.rows
        self._blocks = placement.blocks

    # -- blocks --------------------------------------------------------------------------------

    def grow(self) -> None:
        """Gives a block to every row that cannot run without one."""
        rows = self._rows
        if self._config.sliding_window is not None:
            self._slide_windows()
        order = rows.order
        num_computed = rows.num_computed[order]
        is_stuck = num_computed >= rows.run_limit[order]
        if np.count_nonzero(is_stuck):
            is_stuck &= num_computed < rows.stop_len[order] - ONE
            # Whoever may yet turn out to have slots left waits for that.
            is_stuck &= rows.num_unsure[order] == ZERO
            self._extend_rows(order[is_stuck])
        if self._config.num_lookahead_slots:
            self._look_ahead(self._config.num_lookahead_slots)
        if self._config.most_tokens > 1:
            num_kept = self._blocks.device.num_blocks // _SHARE_KEPT_FREE
            self._look_ahead(self._config.most_tokens, num_kept)

    def _extend_rows(self, row_ids: Int64Array) -> None:
        device = self._blocks.device
        while (victim := self._shares.first_to_yield_share(len(row_ids))) is not None:
            self._placement.preempt(victim, PreemptionCause.SHARE)
            row_ids = row_ids[self._rows.stay_ids[row_ids] != NO_STAY]
        if len(row_ids) > device.num_free:
            self._return_spare(len(row_ids) - device.num_free)
        if len(row_ids) <= device.num_free:
            self._rows.extend_each(row_ids, device.allocate(len(row_ids)))
            return
        for row_id in row_ids.tolist():
            sequence = self._rows.sequences[row_id]
            # A row may have been preempted for a more urgent one.
            if sequence is not None and self.make_room(1, sequence.request):
                self._blocks.extend(row_id, 1)

    def make_room(self, num_blocks: int, request: Request, *, is_joining: bool = False) -> bool:
        """Frees blocks for a running request until there are `num_blocks`.

        False if they come only with the result or the moves of a step, or if the request itself had
        to yield. Least urgent requests yield first; one that is alone and still lacks blocks fails.
        `is_joining`: for one more sequence of it, which waits as long as another can go on.
        """
        placement, blocks = self._placement, self._blocks
        while blocks.device.num_free < num_blocks:
            if self._return_spare(num_blocks - blocks.device.num_free):
                continue
            if blocks.num_deferred or blocks.has_pinned:
                return False
            victim = self._shares.first_to_yield()
            is_alone = self._rows.are_all_of(request)
            if victim is request and is_joining and not (is_alone and self._is_idle()):
                return False
            if is_alone:
                self._fail_alone(request)
                return False
            placement.preempt(victim, PreemptionCause.BLOCKS)
            if victim is request:
                return False
        return True

    def _is_idle(self) -> bool:
        """Whether no row has anything to compute, nor any result to come."""
        rows, order = self._rows, self._rows.order
        is_settled = self._placement.last_planned_step_id == self._placement.last_answered_step_id
        return is_settled and bool((rows.num_computed[order] == rows.num_tokens[order]).all())

    def _fail_alone(self, request: Request) -> None:
        num_blocks = self._blocks.device.num_blocks
        message = (
            f"its {len(request.unfinished)} sequences need more than the KV cache holds "
            f"({num_blocks} blocks of {self._config.block_size} tokens)"
        )
        self._placement.finish(request, FinishReason.ERROR, ("KV_CACHE_EXHAUSTED", message))

    # -- sliding window ------------------------------------------------------------------------

    def _slide_windows(self) -> None:
        """Releases what lies behind windows, and gives prompts room for their next chunk."""
        rows, order = self._rows, self._rows.order
        window, block_size = self._config.sliding_window, self._config.block_size
        assert window is not None
        num_computed = rows.num_computed[order]
        num_sure = num_computed - rows.num_unsure[order]
        first_read = num_sure - window + ONE - rows.may_repeat[order]
        num_behind = np.maximum(first_read, 0) // block_size
        is_behind = num_behind > rows.num_released[order]
        if np.count_nonzero(is_behind):
            self._placement.release_behind_windows(order[is_behind], num_behind[is_behind])
        reach = num_computed + self._config.max_num_batched_tokens
        self._extend_to(order, np.minimum(rows.num_tokens[order], reach))

    def _extend_to(self, row_ids: Int64Array, num_slots: Int32Array, num_kept: int = 0) -> None:
        """Extends tables to `num_slots` as far as blocks are free, without anybody yielding.

        `num_kept`: blocks that stay free.
        """
        device = self._blocks.device
        lacking = -(-(num_slots - self._rows.num_slots[row_ids]) // self._config.block_size)
        is_short = lacking > 0
        num_free = device.num_free - num_kept
        if num_free <= 0 or not np.count_nonzero(is_short):
            return
        row_ids, counts = row_ids[is_short], lacking[is_short]
        counts = np.minimum(counts, num_free - (np.cumsum(counts) - counts))
        row_ids, counts = row_ids[counts > 0], counts[counts > 0].astype(np.int32)
        blocks = device.allocate(int(counts.sum()))
        self._rows.extend_each(row_ids, blocks, counts)

    # -- lookahead -----------------------------------------------------------------------------

    def _look_ahead(self, num_ahead: int, num_kept: int = 0) -> None:
        """Extends tables so that each row has so many slots beyond its tokens, if it can."""
        rows, order = self._rows, self._rows.order
        reach = rows.num_tokens[order] + num_ahead
        self._extend_to(order, np.minimum(reach, rows.stop_len[order]), num_kept)

    def _return_spare(self, num_blocks: int = 1) -> bool:
        """Takes back blocks that nothing is written to yet, as needed; False if there is none.

        Without a window, the tokens that are known keep their slots: they were promised at
        admission, so that no prompt is left without room halfway.
        """
        rows, order = self._rows, self._rows.order
        if self._config.sliding_window is not None:
            needed = rows.num_computed[order] + 1
        elif self._config.num_lookahead_slots or self._config.most_tokens > 1:
            needed = rows.num_tokens[order]
        else:
            return False
        num_spare = np.maximum(rows.num_slots[order] - needed, 0) // self._config.block_size
        # The least urgent first.
        row_ids, counts = order[num_spare > 0][::-1], num_spare[num_spare > 0][::-1]
        counts = np.minimum(counts, num_blocks - (np.cumsum(counts) - counts))
        for row_id, count in zip(row_ids.tolist(), counts.tolist(), strict=True):
            if count <= 0:
                break
            self._blocks.device.free(rows.shrink_table(row_id, count))
        return len(row_ids) > 0

    # -- sequences that join -------------------------------------------------------------------

    def join_siblings(self) -> None:
        """Waiting sequences of running requests get rows, as soon as there is KV to share."""
        if not self._groups:
            return
        for request in filter(self._placement.suspects.may_run, list(self._groups.values())):
            for sequence in request.sequences:
                if sequence.status is Status.WAITING and request.request_id in self._groups:
                    self._try_to_join(sequence)

    @property
    def _groups(self) -> dict[str, Request]:
        return self._placement.groups

    def _try_to_join(self, sequence: Sequence) -> None:
        placement = self._placement
        if sequence.settles_at_step > placement.last_answered_step_id:
            return
        source, num_shared = self._siblings.closest(sequence)
        if source is None:
            return
        first_needed = self._blocks.prefixes.first_block_needed(num_shared)
        if self._rows.num_released[source.row_id] > first_needed:
            self._try_to_join_alone(sequence)
            return
        num_blocks = self._blocks.num_fork_blocks(sequence, num_shared)
        if self.make_room(num_blocks, sequence.request, is_joining=True):
            placement.join(sequence, source, num_shared)

    def _try_to_join_alone(self, sequence: Sequence) -> None:
        """What the others still have is behind their windows, but not behind that of `sequence`."""
        prefixes, device = self._blocks.prefixes, self._blocks.device
        lacking = self._blocks.num_lacking(sequence, prefixes.find(sequence))
        num_blocks = device.num_free + max(lacking, 0)
        if self.make_room(num_blocks, sequence.request, is_joining=True):
            # Making room may have taken something of what was found.
            hit = prefixes.find(sequence)
            if self._blocks.num_lacking(sequence, hit) <= 0:
                self._placement.join_alone(sequence, hit)
