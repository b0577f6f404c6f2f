"""Tokens and blocks of running rows in a step.

Divides the token budget among decodes and prefills, supplies growing rows with blocks, gives rows
to sequences that join, and limits prompt tokens where tenants share a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Items
from itertools import pairwise

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.planning.room import HeldShares
from scheduler_service.scheduler.engine.planning.step_limits import ShortPart, StepLimits, is_again
from scheduler_service.scheduler.engine.row_columns import NO_STAY, ONE, ZERO
from scheduler_service.scheduler.engine.sequences import Siblings
from scheduler_service.scheduler.queue import TURN_EVERY, Key
from scheduler_service.scheduler.values import (
    BoolArray,
    FinishReason,
    Int32Array,
    Int64Array,
    PreemptionCause,
    Request,
    SchedulerConfig,
    Sequence,
)
from scheduler_service.scheduler.values import SequenceStatus as Status

# A prompt is short beside one that is this many times as long.
_SHORTER_BY = 2


def _within(chunks: Int32Array, num_most: int) -> Int32Array:
    """Returns `chunks` cut to `num_most` tokens together, from the last one on. [R] int32."""
    parts: Int32Array = np.clip(num_most - (np.cumsum(chunks) - chunks), 0, chunks)
    return parts.astype(np.int32)


class RunningRows:
    """Divides the tokens of a step among the rows."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._placement = placement
        self._rows = placement.rows
        self._ones = np.ones(config.max_num_seqs, np.int32)
        self._is_uncached = config.is_uncached
        # Steps since the last turn in which rows wanted more tokens than the budget.
        self._num_contended = 0

    def pick(
        self,
        budget: int,
        *,
        decodes: bool,
        without: Items[int] = (),
        limits: StepLimits,
    ) -> tuple[Int64Array, Int32Array]:
        """Chooses decodes, if wanted, then prefills, most urgent first.

        Returns row ids and the number of tokens that each row computes. The last prefill may get
        only a chunk of what it still has to compute; uncached rows get all or nothing. If the
        budget is too small, less urgent decodes yield to more urgent prefills; see `_served`.
        `without`: rows that already have their part of the step. `limits`: those of a step with
        prefills.
        """
        rows, order = self._rows, self._rows.order
        is_turn = self._is_turn
        if is_turn:
            self._num_contended = 0
        may_skip = without or rows.has_held_back or self._placement.suspects
        if decodes and not may_skip and len(order) <= budget and rows.all_decode:
            return order, self._ones[: len(order)]
        is_decode, wanted = self._wants(order, without, decodes=decodes)
        num_decodes, num_wanted = np.count_nonzero(is_decode), int(wanted.sum())
        if num_decodes == num_wanted <= budget:
            return order[is_decode], self._ones[:num_decodes]
        is_prefill = ~is_decode & (wanted > 0)
        budget, prompts = min(budget, limits.num_tokens), limits.prompts
        if prompts is not None and num_wanted - num_decodes > prompts.num_again:
            chunks = wanted[is_prefill].astype(np.int32)
            requests = [self._rows.sequence(i).request for i in order[is_prefill].tolist()]
            again = np.fromiter(map(is_again, requests), np.bool_, len(requests))
            chunks[again] = _within(chunks[again], prompts.num_again)
            wanted[is_prefill] = _within(chunks, prompts.num_most)
            is_prefill &= wanted > 0
            num_wanted = int(wanted.sum())
        served = np.concatenate([np.flatnonzero(is_decode), np.flatnonzero(is_prefill)])
        chunks, shortest = np.zeros(len(order), np.int32), None
        if num_wanted > budget:
            served = self._served(served, is_turn=is_turn)
            num_left = budget - int(num_decodes)
            shortest = None if is_turn else self._shortest(order, is_prefill, num_left)
        if shortest is not None:
            chunks[shortest] = min(limits.num_for_shortest(num_left), int(wanted[shortest]))
            budget -= int(chunks[shortest])
        of_served = (wanted - chunks)[served].astype(np.int32)
        chunks[served] += np.clip(budget - (np.cumsum(of_served) - of_served), 0, of_served)
        if self._is_uncached:
            chunks[chunks < wanted] = 0
        decoding = order[is_decode & (chunks > 0)]
        is_prefill &= chunks > 0
        ids, chunks = order[is_prefill], chunks[is_prefill]
        starts = self._rows.num_computed[ids].tolist()
        for row_id, start, chunk in zip(ids.tolist(), starts, chunks.tolist(), strict=True):
            self._placement.publish_chunk(row_id, start, chunk)
        ones = self._ones[: len(decoding)]
        return np.concatenate([decoding, ids]), np.concatenate([ones, chunks])

    def _wants(
        self, order: Int64Array, without: Items[int], *, decodes: bool
    ) -> tuple[BoolArray, Int32Array | BoolArray]:
        """Returns which rows of `order` decode, and how many tokens each row could compute now.

        Both results are the same array if all rows decode.
        """
        rows = self._rows
        num_computed = rows.num_computed[order]
        pending = rows.num_tokens[order] - num_computed
        may_run = num_computed < rows.run_limit[order]
        if rows.has_held_back:
            may_run &= ~rows.is_held_back[order] | (rows.num_known[order] == rows.num_tokens[order])
        if without:
            may_run &= ~np.isin(order, without)
        if suspects := self._placement.suspects:
            requests = (rows.sequence(row_id).request for row_id in order.tolist())
            may_run &= np.fromiter(map(suspects.may_run, requests), np.bool_, len(order))
        is_decode = (pending == ONE) & may_run if decodes else may_run & False
        if np.count_nonzero(is_decode) == len(order):
            return is_decode, is_decode
        chunks = np.minimum(pending, rows.num_slots[order] - num_computed)
        return is_decode, np.where((pending > 1) & may_run, chunks, is_decode)

    # -- scarce tokens -------------------------------------------------------------------------

    def short_part(self, budget: int, *, decodes: bool, limits: StepLimits) -> ShortPart | None:
        """Returns the part of a step that running prompts leave to a waiting one that is short.

        None if they leave enough as it is, or if the part is for one of them.
        """
        rows, order = self._rows, self._rows.order
        if rows.all_decode or self._is_turn:
            return None
        is_decode, wanted = self._wants(order, (), decodes=decodes)
        is_prefill = ~is_decode & (wanted > 0)
        num_left = min(budget, limits.num_tokens) - int(np.count_nonzero(is_decode))
        num_tokens = limits.num_for_shortest(num_left)
        num_pending = self._pending_of_first(order, is_prefill)
        if num_tokens == 0 or num_pending <= num_left:
            return None
        if self._shortest(order, is_prefill, num_left) is not None:
            return None
        first = int(order[is_prefill][0])
        return ShortPart(num_tokens, num_pending // _SHORTER_BY, rows.step_class(first))

    def _pending_of_first(self, order: Int64Array, is_prefill: BoolArray) -> int:
        """Returns how many tokens the first prefill still has to compute; 0 without one."""
        first = order[is_prefill][:1]
        return int((self._rows.num_tokens[first] - self._rows.num_computed[first]).sum())

    def _shortest(self, order: Int64Array, is_prefill: BoolArray, num_left: int) -> int | None:
        """Returns the index of a short prefill that gets tokens beside a long one; else None.

        Long is the first prefill if it could compute all `num_left` tokens. Short is the one with
        the fewest tokens to compute, of the same step class.
        """
        rows, found = self._rows, np.flatnonzero(is_prefill)
        num_pending = self._pending_of_first(order, is_prefill)
        if len(found) <= 1 or num_pending <= num_left:
            return None
        if self.has_classes:
            first = rows.step_class(order[found[0]])
            found = found[: bisect_right(order[found], first, key=rows.step_class)]
        pending = rows.num_tokens[order[found]] - rows.num_computed[order[found]]
        index = int(np.argmin(pending))
        return int(found[index]) if pending[index] <= num_pending // _SHORTER_BY else None

    @property
    def _is_turn(self) -> bool:
        # A trial takes no turn: rows that have waited for one are not in the trial.
        is_trial = self._placement.suspects.is_planning_trial
        return self._num_contended >= TURN_EVERY and not is_trial

    @property
    def has_classes(self) -> bool:
        """Whether some row may yield tokens of a step to another row."""
        return len(self._rows) > 0 and bool(self._rows.step_class(self._rows.least_urgent.row_id))

    def has_less_urgent(self, step_class: Key) -> bool:
        """Returns whether some row yields tokens of a step to a request of `step_class`."""
        rows = self._rows
        return len(rows) > 0 and step_class < rows.step_class(rows.least_urgent.row_id)

    def may_yield_to(self, step_class: Key) -> bool:
        """Returns whether some row yields tokens of this step to a request of `step_class`.

        In a turn no row yields.
        """
        return not self._is_turn and self.has_less_urgent(step_class)

    def num_wanted(
        self, step_class: Key | None = None, without: Items[int] = (), *, decodes: bool
    ) -> int:
        """Returns how many tokens the rows of classes up to `step_class` could compute now.

        None: all rows. Rows in `without` do not count.
        """
        rows, order = self._rows, self._rows.order
        if step_class is None:
            return int(self._wants(order, without, decodes=decodes)[1].sum())
        end = bisect_right(order, step_class, key=rows.step_class)
        return int(self._wants(order[:end], without, decodes=decodes)[1].sum())

    def _served(self, served: Int64Array, *, is_turn: bool) -> Int64Array:
        """Returns `served` (indexes into the order of rows) in the order of getting scarce tokens.

        Sorts by step class, stable within a class. No row starves: after TURN_EVERY such steps one
        step serves the rows first that were served least recently.
        """
        rows, order = self._rows, self._rows.order
        if rows.step_class(order[0]) == rows.step_class(order[-1]):
            return served
        if is_turn:
            return served[np.argsort(rows.last_step_id[order[served]], kind="stable")]
        self._num_contended += not self._placement.suspects.is_planning_trial
        step_classes = map(rows.step_class, order.tolist())
        is_other = [one != other for one, other in pairwise(step_classes)]
        numbers = np.cumsum([False, *is_other])
        return served[np.argsort(numbers[served], kind="stable")]


# -- Growing rows ----------------------------------------------------------------------------------

# Rows that look ahead to run on leave one block in this many of the pool to other rows.
_SHARE_KEPT_FREE = 8


class GrowingRows:
    """Supplies rows of running requests with blocks; where blocks lack, preempts the least urgent.

    Also gives rows to sequences that join a running request.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement, siblings: Siblings) -> None:
        self._config = config
        self._placement = placement
        self._siblings = siblings
        self._shares = HeldShares(config, placement)
        self._most_tokens = config.most_tokens
        self._rows = placement.rows
        self._blocks = placement.blocks

    # -- blocks --------------------------------------------------------------------------------

    def grow(self) -> None:
        """Gives a block to every row that cannot run without one; may preempt requests."""
        rows = self._rows
        if self._config.sliding_window is not None:
            self._slide_windows()
        stuck = rows.stuck
        if len(stuck):
            lacks = rows.num_computed[stuck] < rows.stop_len[stuck] - ONE
            if self._most_tokens > 1:
                # A row whose steps in flight may bring fewer tokens may have slots left: it waits.
                lacks &= rows.num_unsure[stuck] == ZERO
            self._extend_rows(stuck[lacks])
        if self._config.num_lookahead_slots:
            self._look_ahead(self._config.num_lookahead_slots)
        if self._most_tokens > 1:
            num_kept = self._blocks.device.num_blocks // _SHARE_KEPT_FREE
            self._look_ahead(self._most_tokens, num_kept)

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
        """Frees blocks for a running request until `num_blocks` are free; returns whether they are.

        Returns False if blocks come only with the result or the moves of a step, or if the request
        itself was preempted. Preempts the least urgent requests first; a request that runs alone
        and still lacks blocks fails. `is_joining`: the blocks are for one more sequence of the
        request, which waits as long as another sequence can go on.
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
        """Returns whether no row has anything to compute and no step is in flight."""
        rows, order = self._rows, self._rows.order
        is_settled = self._placement.last_planned_step_id == self._placement.last_answered_step_id
        return is_settled and bool((rows.num_computed[order] == rows.num_tokens[order]).all())

    def _fail_alone(self, request: Request) -> None:
        num_blocks = self._blocks.device.num_blocks
        message = (
            f"the {len(request.unfinished)} sequences need more than the KV cache holds "
            f"({num_blocks} blocks of {self._config.block_size} tokens)"
        )
        self._placement.finish(request, FinishReason.ERROR, ("KV_CACHE_EXHAUSTED", message))

    # -- sliding window ------------------------------------------------------------------------

    def _slide_windows(self) -> None:
        """Releases blocks behind sliding windows, and gives prompts blocks for their next chunk."""
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
        """Extends block tables to `num_slots` as far as blocks are free, without preemption.

        `num_kept`: number of blocks that stay free.
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
        """Extends block tables to `num_ahead` slots beyond the tokens of each row, if possible."""
        rows, order = self._rows, self._rows.order
        reach = rows.num_tokens[order] + num_ahead
        self._extend_to(order, np.minimum(reach, rows.stop_len[order]), num_kept)

    def _return_spare(self, num_blocks: int = 1) -> bool:
        """Takes back up to `num_blocks` blocks that nothing is written to yet; False if none exist.

        Least urgent rows give first. Without a sliding window, known tokens keep their slots:
        admission promised them, so that no prompt runs out of room halfway.
        """
        rows, order = self._rows, self._rows.order
        if self._config.sliding_window is not None:
            needed = rows.num_computed[order] + 1
        elif self._config.num_lookahead_slots or self._config.most_tokens > 1:
            needed = rows.num_tokens[order]
        else:
            return False
        num_spare = np.maximum(rows.num_slots[order] - needed, 0) // self._config.block_size
        row_ids, counts = order[num_spare > 0][::-1], num_spare[num_spare > 0][::-1]
        counts = np.minimum(counts, num_blocks - (np.cumsum(counts) - counts))
        for row_id, count in zip(row_ids.tolist(), counts.tolist(), strict=True):
            if count <= 0:
                break
            self._blocks.device.free(rows.shrink_table(row_id, count))
        return len(row_ids) > 0

    # -- sequences that join -------------------------------------------------------------------

    def join_siblings(self) -> None:
        """Gives rows to waiting sequences of running requests, as soon as there is KV to share."""
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
        """Gives a row to a sequence that cannot share KV with its siblings.

        What the siblings still hold lies behind their windows, but not behind that of `sequence`.
        """
        prefixes, device = self._blocks.prefixes, self._blocks.device
        lacking = self._blocks.num_lacking(sequence, prefixes.find(sequence))
        num_blocks = device.num_free + max(lacking, 0)
        if self.make_room(num_blocks, sequence.request, is_joining=True):
            # Making room may have evicted blocks of the prefix.
            hit = prefixes.find(sequence)
            if self._blocks.num_lacking(sequence, hit) <= 0:
                self._placement.join_alone(sequence, hit)
