"""Running requests go on: blocks for rows that need one, sequences that join, tokens to compute."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement import Placement, running
from scheduler_service.core.request import FinishReason, Int32Array, Request, Sequence
from scheduler_service.core.request import SequenceStatus as Status
from scheduler_service.core.row_columns import Int64Array


class RunningRows:
    """Keeps the rows of running requests supplied; where blocks lack, the least urgent yields."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._rows = placement.rows
        self._blocks = placement.blocks
        self._ones = np.ones(config.max_num_seqs, np.int32)

    # -- what a step computes ------------------------------------------------------------------

    def pick(self, budget: int, *, decodes: bool) -> tuple[Int64Array, Int32Array]:
        """Decodes, if wanted, then prefills, most urgent first: row ids, and tokens each computes.

        The last prefill may get only a chunk of what it still has to compute.
        """
        rows, order = self._rows, self._rows.order
        suspects = self._placement.suspects
        if suspects:
            order = order[[suspects.may_run(s.request) for s in rows.running]]
        num_computed = rows.num_computed[order]
        pending = rows.num_tokens[order] - num_computed
        may_run = num_computed < rows.run_limit[order]
        is_decode = (pending == 1) & may_run if decodes else may_run & False
        if np.count_nonzero(is_decode) == len(order):
            return order[:budget], self._ones[: min(budget, len(order))]
        row_ids = order[is_decode][:budget]
        num_new_tokens = self._ones[: len(row_ids)]
        budget -= len(row_ids)
        prefills = np.flatnonzero((pending > 1) & may_run)
        if len(prefills) == 0 or budget == 0:
            return row_ids, num_new_tokens
        ids = order[prefills]
        wanted = np.minimum(pending[prefills], rows.num_slots[ids] - num_computed[prefills])
        chunks = np.minimum(wanted, budget - (np.cumsum(wanted) - wanted))
        ids, chunks = ids[chunks > 0], chunks[chunks > 0].astype(np.int32)
        starts = rows.num_computed[ids].tolist()
        for row_id, start, chunk in zip(ids.tolist(), starts, chunks.tolist(), strict=True):
            self._placement.publish_chunk(row_id, start, chunk)
        return np.concatenate([row_ids, ids]), np.concatenate([num_new_tokens, chunks])

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
            is_stuck &= num_computed < rows.stop_len[order] - 1
            self._extend_rows(order[is_stuck])
        if self._config.num_lookahead_slots:
            self._look_ahead()

    def _extend_rows(self, row_ids: Int64Array) -> None:
        device = self._blocks.device
        if len(row_ids) <= device.num_free:
            self._extend_each(row_ids)
            return
        for row_id in row_ids.tolist():
            sequence = self._rows.sequences[row_id]
            # A row may have been preempted for a more urgent one.
            if sequence is not None and self.make_room(1, sequence.request):
                self._extend_each(np.array([row_id]))

    def _extend_each(self, row_ids: Int64Array) -> None:
        blocks = self._blocks.device.allocate(len(row_ids))
        indexes: list[int] = self._rows.extend_each(row_ids, blocks).tolist()
        changes = self._placement.changes
        if not changes.new and not changes.table_writes:
            changes.table_writes.add_each(row_ids.tolist(), indexes, blocks)
            return
        for row_id, index, block in zip(row_ids.tolist(), indexes, blocks, strict=True):
            changes.extend(row_id, index, [block])

    def make_room(self, num_blocks: int, request: Request, *, is_joining: bool = False) -> bool:
        """Frees blocks for a running request until there are `num_blocks`.

        False if they come only with the result or the moves of a step, or if the request itself had
        to yield. Least urgent requests yield first; one that is alone and still lacks blocks fails.
        `is_joining`: for one more sequence of it, which waits as long as another can go on.
        """
        placement, blocks = self._placement, self._blocks
        while blocks.device.num_free < num_blocks:
            if self._return_spare():
                continue
            if blocks.num_deferred or blocks.has_pinned:
                return False
            victim = self._rows.sequence(int(self._rows.order[-1])).request
            is_alone = victim is request and all(s.request is request for s in self._rows.running)
            if victim is request and is_joining and not (is_alone and self._is_idle()):
                return False
            if is_alone:
                self._fail_alone(request)
                return False
            placement.preempt(victim)
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
        num_behind = np.maximum(num_computed - window + 1, 0) // block_size
        for row_id in order[num_behind > rows.num_released[order]].tolist():
            self._placement.release_behind_window(row_id)
        reach = num_computed + self._config.max_num_batched_tokens
        self._extend_to(order, np.minimum(rows.num_tokens[order], reach))

    def _extend_to(self, row_ids: Int64Array, num_slots: Int32Array) -> None:
        """Extends tables to `num_slots` as far as blocks are free, without anybody yielding."""
        lacking = num_slots - self._rows.num_slots[row_ids]
        is_short = lacking > 0
        for row_id, count in zip(
            row_ids[is_short].tolist(), lacking[is_short].tolist(), strict=True
        ):
            num_blocks = min(self._config.num_blocks_for(count), self._blocks.device.num_free)
            if num_blocks > 0:
                start = int(self._rows.num_slots[row_id]) // self._config.block_size
                blocks = self._blocks.extend(row_id, num_blocks)
                self._placement.changes.extend(row_id, start, blocks)

    # -- lookahead -----------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Extends tables so that each row has the configured slots beyond its tokens, if it can."""
        rows, order = self._rows, self._rows.order
        reach = rows.num_tokens[order] + self._config.num_lookahead_slots
        self._extend_to(order, np.minimum(reach, rows.stop_len[order]))

    def _return_spare(self) -> bool:
        """Takes back a block that nothing is written to yet; False if there is none.

        Without a window, the tokens that are known keep their slots: they were promised at
        admission, so that no prompt is left without room halfway.
        """
        rows, order = self._rows, self._rows.order
        if self._config.sliding_window is not None:
            needed = rows.num_computed[order] + 1
        elif self._config.num_lookahead_slots:
            needed = rows.num_tokens[order]
        else:
            return False
        has_spare = rows.num_slots[order] - self._config.block_size >= needed
        spare_rows: list[int] = order[has_spare].tolist()
        if not spare_rows:
            return False
        self._placement.changes.table_writes.shorten(spare_rows[-1])
        self._blocks.device.free([rows.shrink_table(spare_rows[-1])])
        return True

    # -- sequences that join -------------------------------------------------------------------

    def join_siblings(self) -> None:
        """Waiting sequences of running requests get rows, as soon as there is KV to share."""
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
        source, num_shared = self._closest(sequence)
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

    def _closest(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The running sequence that shares most with `sequence`, and how many tokens.

        None while that one has not computed them yet, or is itself being placed by this step.
        """
        rows = self._rows
        best: Sequence | None = None
        most = -1
        for sibling in running(sequence.request):
            known = rows.known_tokens(sibling.row_id)
            length = min(len(known), len(sequence.token_ids))
            differs = np.flatnonzero(known[:length] != sequence.token_ids[:length])
            common = int(differs[0]) if len(differs) else length
            common = min(common, len(sequence.token_ids) - 1)
            if common > most:
                best, most = sibling, common
        if best is None or best.row_id in self._placement.changes.new:
            return None, 0
        return (best, most) if rows.num_computed[best.row_id] >= most else (None, 0)
