"""The memory that recorded steps of decodes read, and how a step gets into it.

Shape letters: R rows of a step, N rows of a recording, M blocks of the longest table that a
sequence can have, W of the longest in a step.
"""

from __future__ import annotations

import numpy as np
import torch

from executor_service.device.kv_cache import KVCache
from executor_service.device.uploads import Numbers, Uploads, views
from executor_service.model.input_batch import PassRows, PassTensors, fill_in
from splitserve_kernels.paged_batch import PagedBatch


class DecodeInputs:
    """Up to `max_num_rows` rows, each with one new token."""

    def __init__(self, max_num_rows: int, max_model_len: int, cache: KVCache) -> None:
        """All rows are added ones until `fill` is called."""
        device, block_size = cache.device, cache.block_size
        self._max_num_rows = max_num_rows
        self._width = -(-max_model_len // block_size)
        self._max_num_tokens = self._width * block_size
        widest = self._numbers(np.zeros((max_num_rows, self._width), np.int32))
        # Where a step arrives, in one copy: its tables beside each other, as wide as they are.
        self._arrived = torch.zeros(widest.num_bytes, dtype=torch.uint8, device=device)
        longs, ints = views(self._arrived, widest)
        self._input_ids, self._position_ids, self._slots, *others = longs
        self._places, self._indexes, self._row_ids = others
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

    def fill(self, rows: PassRows, num_rows: int, uploads: Uploads) -> None:
        """Asks for `rows`, R decodes, in place of what is there, and for N - R added rows.

        `num_rows`: N. Added rows write to no slot and read block 0.
        """
        real, resident = rows.num_rows, rows.resident
        # What lies beyond the last token of the longest sequence is never read.
        width = min(rows.block_tables.shape[1], self._width)
        tables = None
        if resident is None:
            tables = np.zeros((num_rows, width), np.int32)
            tables[:real] = rows.block_tables[:, :width]
        numbers = self._numbers(tables)
        input_ids, positions, slots, places, indexes, row_ids = numbers.longs
        input_ids[:real] = rows.token_ids
        positions[:real] = rows.layout.positions
        slots[:real] = rows.layout.slots
        numbers.ints[0][:real] = rows.num_computed_tokens
        awaited = rows.awaited
        num_awaited = 0 if awaited is None else len(awaited.places)
        if awaited is not None:
            places[:num_awaited] = awaited.places
            indexes[:num_awaited] = awaited.indexes
        if resident is not None:
            row_ids[:real] = resident.row_ids
            row_ids[real:num_rows] = resident.empty_row_id
        uploads.send_to(self._arrived, numbers)
        target = self._tables[:num_rows, :width]
        if resident is not None:
            resident.gather(self._row_ids[:num_rows], width, out=target)
        elif tables is not None:
            target.copy_(self._arrived_tables[: tables.size].view(tables.shape))
        if awaited is not None:
            where = self._places[:num_awaited], self._indexes[:num_awaited]
            fill_in(self._input_ids[:real], awaited, *where)

    def _numbers(self, tables: np.ndarray | None) -> Numbers:
        """Input ids, positions, slots, places and indexes of what is awaited, row ids; computed.

        Of added rows alone. `tables` [N, W]: None if the device has them.
        """
        longs = [np.zeros(self._max_num_rows, np.int64) for _ in range(6)]
        longs[2][:] = -1
        ints = [np.zeros(self._max_num_rows, np.int32)]
        return Numbers(longs, ints if tables is None else [*ints, tables])
