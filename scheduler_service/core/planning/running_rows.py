"""What rows compute in a step: decodes and prompts under its budget of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Items
from itertools import pairwise

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement import Placement
from scheduler_service.core.planning.prompt_limit import PromptTokens, is_again
from scheduler_service.core.queue.key_order import TURN_EVERY
from scheduler_service.core.queue.ordered_queue import Key
from scheduler_service.core.request import BoolArray, Int32Array, Int64Array
from scheduler_service.core.row_columns import ONE


def _within(chunks: Int32Array, num_most: int) -> Int32Array:
    """As much of these, from the first on, as is `num_most` together."""
    parts: Int32Array = np.clip(num_most - (np.cumsum(chunks) - chunks), 0, chunks)
    return parts.astype(np.int32)


class RunningRows:
    """Divides the tokens of a step among the rows."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._placement = placement
        self._rows = placement.rows
        self._ones = np.ones(config.max_num_seqs, np.int32)
        # Steps since the last turn in which there was less for rows than they wanted.
        self._num_contended = 0

    def pick(
        self,
        budget: int,
        *,
        decodes: bool,
        without: Items[int] = (),
        prompts: PromptTokens | None = None,
    ) -> tuple[Int64Array, Int32Array]:
        """Decodes, if wanted, then prefills, most urgent first: row ids, and tokens each computes.

        The last prefill may get only a chunk of what it still has to compute. If the budget is too
        small, less urgent decodes yield to more urgent prefills; see `_served`. `without`: rows
        that have their part of the step. `prompts`: for all prefills together, if these are
        limited.
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
        if prompts is not None and num_wanted - num_decodes > prompts.num_again:
            chunks = wanted[is_prefill].astype(np.int32)
            requests = [self._rows.sequence(i).request for i in order[is_prefill].tolist()]
            again = np.fromiter(map(is_again, requests), np.bool_, len(requests))
            chunks[again] = _within(chunks[again], prompts.num_again)
            wanted[is_prefill] = _within(chunks, prompts.num_most)
            is_prefill &= wanted > 0
            num_wanted = int(wanted.sum())
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

    # -- who yields tokens ---------------------------------------------------------------------

    @property
    def _is_turn(self) -> bool:
        # Whoever has waited for a turn is not in a trial.
        is_trial = self._placement.suspects.is_planning_trial
        return self._num_contended >= TURN_EVERY and not is_trial

    @property
    def has_classes(self) -> bool:
        """Whether some row may yield tokens of a step to another."""
        return len(self._rows) > 0 and bool(self._rows.step_class(self._rows.least_urgent.row_id))

    def has_less_urgent(self, step_class: Key) -> bool:
        """Returns whether some row yields tokens of a step to a request of this class."""
        rows = self._rows
        return len(rows) > 0 and step_class < rows.step_class(rows.least_urgent.row_id)

    def may_yield_to(self, step_class: Key) -> bool:
        """Returns whether some row yields tokens of this step to a request of this class."""
        return not self._is_turn and self.has_less_urgent(step_class)

    def num_wanted(
        self, step_class: Key | None = None, without: Items[int] = (), *, decodes: bool
    ) -> int:
        """Returns how many tokens all rows could compute now, or those of up to this class."""
        rows, order = self._rows, self._rows.order
        if step_class is None:
            return int(self._wants(order, without, decodes=decodes)[1].sum())
        end = bisect_right(order, step_class, key=rows.step_class)
        return int(self._wants(order[:end], without, decodes=decodes)[1].sum())

    def _served(self, served: Int64Array, *, is_turn: bool) -> Int64Array:
        """Indexes in the order of the rows, in the order in which they get tokens of a scarce step.

        By class, within a class as given. But nobody starves: after TURN_EVERY such steps there is
        one in which rows are served first that were served least lately.
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
