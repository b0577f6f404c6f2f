"""What the sequences of a request have in common, so that one can join by sharing KV of another."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.placement import Placement, running
from scheduler_service.core.request import Sequence
from scheduler_service.core.request import SequenceStatus as Status


class Siblings:
    """Finds what to share."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rows = placement.rows

    def join_before_end(self, leaving: Sequence) -> None:
        """Siblings that wait join now if `leaving`, which ends, is the last that has KV to share.

        From blocks that are free; for whom there are none, the prompt is computed again.
        """
        request, placement, blocks = leaving.request, self._placement, self._placement.blocks
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

    def closest(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The running sequence that shares most with `sequence`, and how many tokens.

        None while that one has not computed them yet, or is itself being placed by this step.
        """
        best: Sequence | None = None
        most = -1
        for sibling in running(sequence.request):
            common = self._num_common(sibling, sequence)
            if common > most:
                best, most = sibling, common
        if best is None or best.row_id in self._placement.draft.new_rows:
            return None, 0
        return (best, most) if self._rows.num_computed[best.row_id] >= most else (None, 0)

    def _num_common(self, sibling: Sequence, sequence: Sequence) -> int:
        """How many tokens a sequence without a row shares with a running one, less its last."""
        known = self._rows.known_tokens(sibling.row_id)
        length = min(len(known), len(sequence.token_ids))
        differs = np.flatnonzero(known[:length] != sequence.token_ids[:length])
        common = int(differs[0]) if len(differs) else length
        return min(common, len(sequence.token_ids) - 1)
