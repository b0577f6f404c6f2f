"""Parts of a core without its scheduler, for tests of their own."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from scheduler_service.scheduler.engine.blocks.block_manager import BlockManager
from scheduler_service.scheduler.engine.blocks.prefix_cache import NO_HIT, PrefixHit
from scheduler_service.scheduler.engine.planning.rows import GrowingRows
from scheduler_service.scheduler.engine.row_columns import RowColumns
from scheduler_service.scheduler.engine.sequences import Siblings
from scheduler_service.scheduler.values.request import (
    DEFAULT_SCHEDULING,
    Request,
    SchedulingParams,
    Sequence,
)
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from tests.support.core.driver import CoreDriver, make_config


def growing_rows(driver: CoreDriver) -> GrowingRows:
    """What supplies the rows of a core before each of its steps."""
    placement = driver.core.placement
    return GrowingRows(driver.config, placement, Siblings(placement))


class Tables:
    """A block manager and the rows whose tables it fills."""

    def __init__(self, **options: object) -> None:
        self.config = make_config(**options)
        max_blocks = self.config.num_blocks_for(self.config.max_len) + 1
        self.rows = RowColumns(
            self.config.max_num_seqs, self.config.max_len, self.config.block_size, max_blocks
        )
        self.blocks = BlockManager(self.config, self.rows)
        self._num_requests = 0

    def request(
        self,
        prompt: Items[int],
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        encoder: Items[int] | None = None,
        **params: object,
    ) -> Request:
        """A request that is nowhere yet."""
        self._num_requests += 1
        return Request.create(
            f"r{self._num_requests}",
            prompt,
            SamplingParams(**params),  # type: ignore[arg-type]
            arrival=self._num_requests,
            seed=0,
            scheduling=scheduling,
            encoder_token_ids=encoder,
        )

    def sequence(self, prompt: Items[int]) -> Sequence:
        """The sequence of a new request."""
        return self.request(prompt).sequence

    def place(self, sequence: Sequence, hit: PrefixHit = NO_HIT) -> list[int]:
        """Gives a sequence a row and its blocks; returns them."""
        self.rows.add(sequence, (sequence.request.arrival,), hit.num_tokens)
        self.blocks.allocate(sequence, hit)
        return self.table(sequence)

    def place_published(self, prompt: Items[int]) -> tuple[Sequence, list[int]]:
        """A running sequence whose full blocks can be found."""
        sequence = self.sequence(prompt)
        table = self.place(sequence)
        num_full = len(prompt) // self.config.block_size
        self.blocks.prefixes.publish(sequence, sequence.token_ids, table[:num_full], 0)
        return sequence, table

    def fork(self, source: Sequence, sequence: Sequence, num_shared: int) -> list[int]:
        """Gives `sequence` a row that shares what `source` has; returns its blocks."""
        self.rows.add(sequence, (sequence.request.arrival,), num_shared)
        self.blocks.fork(source.row_id, sequence, num_shared)
        return self.table(sequence)

    def slide(self, sequence: Sequence) -> None:
        """Takes back what lies behind the window of a sequence."""
        row_ids = np.array([sequence.row_id], np.int64)
        end = self.blocks.prefixes.first_block_needed(int(self.rows.num_computed[row_ids[0]]))
        self.blocks.release_behind_windows(row_ids, np.array([end], np.int32), 0)

    def leave(self, sequence: Sequence) -> None:
        """Takes row and blocks back; no step is in flight."""
        self.blocks.release(sequence.row_id, last_answered_step_id=0)
        self.rows.remove(sequence)

    def table(self, sequence: Sequence) -> list[int]:
        """The block table of a running sequence."""
        blocks: list[int] = self.rows.block_table(sequence.row_id).tolist()
        return blocks
