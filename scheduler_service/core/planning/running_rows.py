"""Running requests go on: blocks for rows that need one, sequences that join, tokens to compute."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Items
from itertools import pairwise

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement import Placement, running
from scheduler_service.core.policies.request_queue import Key
from scheduler_service.core.policies.urgency import TURN_EVERY
from scheduler_service.core.request import FinishReason, Int32Array, Request, Sequence
from scheduler_service.core.request import SequenceStatus as Status
from scheduler_service.core.row_columns import ONE, BoolArray, Int64Array


class RunningRows:
    """Keeps the rows of running requests supplied; where blocks lack, the least urgent yields."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._rows = placement.rows
        self._blocks = placement.blocks
        self._ones = np.ones(config.max_num_seqs, np.int32)
        # Steps since the last turn in which there was less for rows than they wanted.
        self._num_contended = 0

    # -- what a step computes ------------------------------------------------------------------

    def pick(
        self, budget: int, *, decodes: bool, without: Items[int] = ()
    ) -> tuple[Int64Array, Int32Array]:
        """Decodes, if wanted, then prefills, most urgent first: row ids, and tokens each computes.

        The last prefill may get only a chunk of what it still has to compute. If the budget is too
        small, less urgent decodes yield to more urgent prefills; see `_served`. `without`: rows
        that have their part of the step.
        """
        order = self._rows.order
        is_turn = self._is_turn
        if is_turn:
            self._num_contended = 0
        is_decode, wanted = self._wants(order, without, decodes=decodes)
        if wanted is is_decode and len(order) <= budget:
            return order, self._ones[: len(order)]
        num_decodes, num_wanted = np.count_nonzero(is_decode), int(wanted.sum())
        if num_decodes == num_wanted <= budget:
            return order[is_decode], self._ones[:num_decodes]
        is_prefill = ~is_decode & (wanted > 0)
        served = np.concatenate([np.flatnonzero(is_decode), np.flatnonzero(is_prefill)])
        if num_wanted > budget:
            served = self._served(served, is_turn=is_turn)
        chunks = np.zeros(len(order), np.int32)
        of_served = wanted[served].astype(np.int32)
        chunks[served] = np.clip(budget - (np.cumsum(of_served) - of_served), 0, of_served)
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
        """Which of these rows decode, and how many tokens each could compute now.

        The second is the first if all of them decode.
        """
        rows = self._rows
        num_computed = rows.num_computed[order]
        pending = rows.num_tokens[order] - num_computed
        may_run = num_computed < rows.run_limit[order]
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

    # -- who yields tokens ---------------------------------------------------------------------

    @property
    def _is_turn(self) -> bool:
        # Whoever has waited for a turn is not in a trial.
        is_trial = self._placement.suspects.is_planning_trial
        return self._num_contended >= TURN_EVERY and not is_trial

    def has_less_urgent(self, urgency: Key) -> bool:
        """Whether some row yields tokens of a step to what is so urgent."""
        rows = self._rows
        return len(rows) > 0 and urgency < rows.urgency(rows.least_urgent.row_id)

    def may_yield_to(self, urgency: Key) -> bool:
        """Whether some row yields tokens of this step to what is so urgent."""
        return not self._is_turn and self.has_less_urgent(urgency)

    def num_wanted(
        self, urgency: Key | None = None, without: Items[int] = (), *, decodes: bool
    ) -> int:
        """Tokens that rows could compute now, all or those that are as urgent or more."""
        rows, order = self._rows, self._rows.order
        if urgency is None:
            return int(self._wants(order, without, decodes=decodes)[1].sum())
        end = bisect_right(order, urgency, key=rows.urgency)
        return int(self._wants(order[:end], without, decodes=decodes)[1].sum())

    def _served(self, served: Int64Array, *, is_turn: bool) -> Int64Array:
        """Places in the order of the rows, in the order in which they get tokens of a scarce step.

        By urgency, among equals as given. But nobody starves: after TURN_EVERY such steps there is
        one in which rows are served first that were served least lately.
        """
        rows, order = self._rows, self._rows.order
        if rows.urgency(order[0]) == rows.urgency(order[-1]):
            return served
        if is_turn:
            return served[np.argsort(rows.last_step_id[order[served]], kind="stable")]
        self._num_contended += not self._placement.suspects.is_planning_trial
        urgencies = map(rows.urgency, order.tolist())
        is_other = [one != other for one, other in pairwise(urgencies)]
        classes = np.cumsum([False, *is_other])
        return served[np.argsort(classes[served], kind="stable")]

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
            self._extend_rows(order[is_stuck])
        if self._config.num_lookahead_slots:
            self._look_ahead()

    def _extend_rows(self, row_ids: Int64Array) -> None:
        device = self._blocks.device
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
            victim = self._rows.least_urgent.request
            is_alone = self._rows.are_all_of(request)
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
        is_behind = num_behind > rows.num_released[order]
        if np.count_nonzero(is_behind):
            self._placement.release_behind_windows(order[is_behind], num_behind[is_behind])
        reach = num_computed + self._config.max_num_batched_tokens
        self._extend_to(order, np.minimum(rows.num_tokens[order], reach))

    def _extend_to(self, row_ids: Int64Array, num_slots: Int32Array) -> None:
        """Extends tables to `num_slots` as far as blocks are free, without anybody yielding."""
        device = self._blocks.device
        lacking = -(-(num_slots - self._rows.num_slots[row_ids]) // self._config.block_size)
        is_short = lacking > 0
        if device.num_free == 0 or not np.count_nonzero(is_short):
            return
        row_ids, counts = row_ids[is_short], lacking[is_short]
        counts = np.minimum(counts, device.num_free - (np.cumsum(counts) - counts))
        row_ids, counts = row_ids[counts > 0], counts[counts > 0].astype(np.int32)
        blocks = device.allocate(int(counts.sum()))
        self._rows.extend_each(row_ids, blocks, counts)

    # -- lookahead -----------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Extends tables so that each row has the configured slots beyond its tokens, if it can."""
        rows, order = self._rows, self._rows.order
        reach = rows.num_tokens[order] + self._config.num_lookahead_slots
        self._extend_to(order, np.minimum(reach, rows.stop_len[order]))

    def _return_spare(self, num_blocks: int = 1) -> bool:
        """Takes back blocks that nothing is written to yet, as needed; False if there is none.

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

    def join_before_end(self, leaving: Sequence) -> None:
        """Siblings that wait join now if `leaving`, which ends, is the last that has KV to share.

        From blocks that are free; for whom there are none, the prompt is computed again.
        """
        request, placement, blocks = leaving.request, self._placement, self._blocks
        if list(running(request)) != [leaving]:
            return
        for sequence in request.unfinished:
            if sequence.status is not Status.WAITING:
                continue
            num_shared = self._num_common(leaving, sequence)
            first_needed = blocks.prefixes.first_block_needed(num_shared)
            is_there = self._rows.num_released[leaving.row_id] <= first_needed
            if is_there and blocks.num_fork_blocks(sequence, num_shared) <= blocks.device.num_free:
                placement.join(sequence, leaving, num_shared)

    def _closest(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The running sequence that shares most with `sequence`, and how many tokens.

        None while that one has not computed them yet, or is itself being placed by this step.
        """
        best: Sequence | None = None
        most = -1
        for sibling in running(sequence.request):
            common = self._num_common(sibling, sequence)
            if common > most:
                best, most = sibling, common
        if best is None or best.row_id in self._placement.changes.new:
            return None, 0
        return (best, most) if self._rows.num_computed[best.row_id] >= most else (None, 0)

    def _num_common(self, sibling: Sequence, sequence: Sequence) -> int:
        """How many tokens a sequence without a row shares with a running one, less its last."""
        known = self._rows.known_tokens(sibling.row_id)
        length = min(len(known), len(sequence.token_ids))
        differs = np.flatnonzero(known[:length] != sequence.token_ids[:length])
        common = int(differs[0]) if len(differs) else length
        return min(common, len(sequence.token_ids) - 1)
