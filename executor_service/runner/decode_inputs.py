"""The memory that recorded steps of decodes read, and how a step gets into it.

Shape letters: R rows of a step, N rows of a recording, M blocks of the longest table that a
sequence can have, W of the longest in a step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_service.device.kv_cache import KVCache
from executor_service.device.uploads import Numbers, Uploads, views
from executor_service.model.input_batch import PassRows, PassTensors, fill_in
from executor_service.sampling.static_draw import StaticDraw
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.paged_batch import PagedBatch


class DecodeInputs:
    """Up to `max_num_rows` rows, each with one new token."""

    def __init__(
        self,
        max_num_rows: int,
        max_model_len: int,
        cache: KVCache,
        static_draw: StaticDraw | None = None,
    ) -> None:
        """All rows are added ones until `fill` is called.

        `static_draw`: what draws from their logits; None if that is not recorded.
        """
        self._static_draw = static_draw
        device, block_size = cache.device, cache.block_size
        self._max_num_rows = max_num_rows
        self._width = -(-max_model_len // block_size)
        self._max_num_tokens = self._width * block_size
        widest = self._numbers(np.zeros((max_num_rows, self._width), np.int32))
        # Where a step arrives, in one copy: its tables beside each other, as wide as they are.
        self._arrived = torch.zeros(widest.num_bytes, dtype=torch.uint8, device=device)
        longs, ints = views(self._arrived, widest)
        self._input_ids, self._position_ids, self._slots, *others = longs
        self._places, self._indexes, self._words = others
        self._num_computed, tables = ints
        self._arrived_tables = tables.view(-1)
        self._slots.fill_(-1)
        self._rows = torch.arange(max_num_rows + 1, device=device)
        self._query_starts = self._rows.to(torch.int32)
        self._tables = torch.zeros(max_num_rows, self._width, dtype=torch.int32, device=device)

    def tensors(self, num_rows: int) -> PassTensors:
        """The first `num_rows` rows, as views of the memory."""
        paged = PagedBatch(
            block_tables=self._tables[:num_rows],
            num_computed_tokens=self._num_computed[:num_rows],
            query_starts=self._query_starts[: num_rows + 1],
            slot_mapping=self._slots[:num_rows],
            max_num_new_tokens=1,
            # Kernels are launched for the longest sequence that there can be.
            max_num_tokens=self._max_num_tokens,
            num_decodes=num_rows,
        )
        return PassTensors(
            input_ids=self._input_ids[None, :num_rows],
            position_ids=self._position_ids[None, :num_rows],
            paged=paged,
            logits_index=self._rows[:num_rows],
        )

    def words(self, num_rows: int) -> Tensor:
        """How the first `num_rows` rows are drawn, a view of the memory."""
        return self._words[: self._num_words(num_rows)]

    def fill(
        self, rows: PassRows, num_rows: int, uploads: Uploads, draws: DrawRows | None = None
    ) -> None:
        """Asks for `rows`, R decodes, in place of what is there, and for N - R added rows.

        `num_rows`: N. Added rows write to no slot and read block 0. `draws`: how the rows are
        drawn; None if it makes no difference.
        """
        real = rows.num_rows
        # What lies beyond the last token of the longest sequence is never read.
        width = min(rows.block_tables.shape[1], self._width)
        tables = np.zeros((num_rows, width), np.int32)
        tables[:real] = rows.block_tables[:, :width]
        numbers = self._numbers(tables)
        input_ids, positions, slots, places, indexes, words = numbers.longs
        input_ids[:real] = rows.token_ids
        positions[:real] = rows.layout.positions
        slots[:real] = rows.layout.slots
        numbers.ints[0][:real] = rows.num_computed_tokens
        awaited = rows.awaited
        num_awaited = 0 if awaited is None else len(awaited.places)
        if awaited is not None:
            places[:num_awaited] = awaited.places
            indexes[:num_awaited] = awaited.indexes
        if draws is not None and self._static_draw is not None:
            self._static_draw.pack(draws, words[: self._num_words(num_rows)])
        uploads.send_to(self._arrived, numbers)
        arrived: Tensor = self._arrived_tables[: tables.size].view(tables.shape)
        self._tables[:num_rows, :width].copy_(arrived)
        if awaited is not None:
            where = self._places[:num_awaited], self._indexes[:num_awaited]
            fill_in(self._input_ids[:real], awaited, *where)

    def _numbers(self, tables: np.ndarray) -> Numbers:
        """Of added rows alone, which are greedy; `tables` [N, W].

        Input ids, positions, slots, places and indexes of what is awaited, words of the draw.
        """
        longs = [np.zeros(self._max_num_rows, np.int64) for _ in range(5)]
        longs[2][:] = -1
        longs.append(np.zeros(self._num_words(self._max_num_rows), np.int64))
        return Numbers(longs, [np.zeros(self._max_num_rows, np.int32), tables])

    def _num_words(self, num_rows: int) -> int:
        return 0 if self._static_draw is None else self._static_draw.num_words(num_rows)
