"""The memory that recorded steps read, and how a step gets into it.

Shape letters: those of `step_shapes`; N rows of a shape, R of a step, W blocks of the longest table
that is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from executor_service.device.kv_cache import KVCache
from executor_service.device.uploads import Array, Int32Array, Int64Array, Numbers, Uploads, views
from executor_service.model.input_batch import PassRows, PassTensors, fill_in
from executor_service.sampling.sampler import StaticDraw
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.paged_batch import PagedBatch


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A step of one shape as it is copied. `places`, `indexes`: [N], of what is awaited.

    `input_ids`, `positions`, `slots`: [T]. `logits_index`: [L]. `words`: of the draw. `row_ids`:
    [N], where the device has the tables; else `tables` has them, which is without columns then.
    `num_computed`: [N]. `num_left`: [N], tokens that rows of a decode may get, 0 where only one is
    drawn anyhow. `query_starts`: [N + 1]. `tables`: [N, W].
    """

    input_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    logits_index: Int64Array
    places: Int64Array
    indexes: Int64Array
    words: Int64Array
    row_ids: Int64Array
    num_computed: Int32Array
    num_left: Int32Array
    query_starts: Int32Array
    tables: Int32Array

    @property
    def numbers(self) -> Numbers:
        """Tables last: all else lies in the same place however wide they are."""
        longs = [self.input_ids, self.positions, self.slots, self.logits_index]
        longs += [self.places, self.indexes, self.words, self.row_ids]
        ints = [self.num_computed, self.num_left, self.query_starts, self.tables]
        return Numbers(longs, ints)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """`_Arrays` on the device; of `tables` those of all rows, as wide as can be."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    logits_index: Tensor
    places: Tensor
    indexes: Tensor
    words: Tensor
    row_ids: Tensor
    num_computed: Tensor
    num_left: Tensor
    query_starts: Tensor
    tables: Tensor


class StaticInputs:
    """Steps of some shapes, one at a time: all have the same memory."""

    def __init__(
        self,
        shapes: Sequence[StepShape],
        max_model_len: int,
        cache: KVCache,
        static_draw: StaticDraw | None = None,
    ) -> None:
        """Nothing is there until `fill` is called.

        `static_draw`: what draws from their logits; None if that is not recorded.
        """
        self._static_draw = static_draw
        self._block_size = cache.block_size
        self._width = -(-max_model_len // cache.block_size)
        self._max_num_tokens = self._width * cache.block_size
        # Where a step arrives, in one copy: its tables beside each other, as wide as they are.
        num_bytes = max(self._added(shape, self._width).numbers.num_bytes for shape in shapes)
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=cache.device)
        most_rows = max(shape.num_rows for shape in shapes)
        self._tables = self._memory.new_zeros(most_rows, self._width, dtype=torch.int32)
        self._arrived = {shape: self._views(shape) for shape in shapes}

    def tensors(self, shape: StepShape) -> PassTensors:
        """A step of `shape`, as views of the memory."""
        arrived = self._arrived[shape]
        paged = PagedBatch(
            block_tables=self._tables[: shape.num_rows],
            num_computed_tokens=arrived.num_computed,
            query_starts=arrived.query_starts,
            slot_mapping=arrived.slots,
            max_num_new_tokens=1 if shape.is_decode else shape.num_tokens,
            # Kernels are launched for the longest sequence that there can be.
            max_num_tokens=self._max_num_tokens,
            num_decodes=shape.num_decodes,
        )
        return PassTensors(
            arrived.input_ids[None], arrived.positions[None], paged, arrived.logits_index
        )

    def words(self, shape: StepShape) -> Tensor:
        """How the lines of logits of `shape` are drawn, a view of the memory."""
        return self._arrived[shape].words

    def num_left(self, shape: StepShape) -> Tensor:
        """How many tokens the rows of `shape` may get, a view of the memory."""
        return self._arrived[shape].num_left

    def fill(
        self,
        rows: PassRows,
        shape: StepShape,
        uploads: Uploads,
        draws: DrawRows | None = None,
        most_tokens: Int32Array | None = None,
    ) -> None:
        """Asks for `rows`, which `shape` has room for, in place of what is there.

        Added tokens write to no slot; where they have rows, these read block 0. `draws`: how the
        first lines of logits are drawn; None if it makes no difference. `most_tokens`: how many the
        rows of a decode may get; None if they do not run on.
        """
        num_tokens, num_decodes = len(rows.token_ids), rows.layout.num_decodes
        width, resident, awaited = self._width_read(rows, shape), rows.resident, rows.awaited
        arrays = self._added(shape, width if resident is None else 0)
        arrays.input_ids[:num_tokens] = rows.token_ids
        arrays.positions[:num_tokens] = rows.layout.positions
        arrays.slots[:num_tokens] = rows.layout.slots
        arrays.logits_index[: len(rows.logits_index)] = rows.logits_index
        _put_rows(arrays.num_computed, rows.num_computed_tokens, num_decodes, shape)
        if resident is None:
            tables = rows.block_tables[:, :width]
            _put_rows(arrays.tables[:, : tables.shape[1]], tables, num_decodes, shape)
        else:
            arrays.row_ids[:] = resident.empty_row_id
            _put_rows(arrays.row_ids, resident.row_ids, num_decodes, shape)
        if not shape.is_decode:
            _put_starts(arrays.query_starts, rows.layout.query_starts, num_decodes, shape)
            # What nobody attended for would be whatever memory holds. No more have blocks.
            arrays.query_starts[-1] = min(shape.num_tokens, num_tokens + self._max_num_tokens)
        num_awaited = 0 if awaited is None else len(awaited.places)
        if awaited is not None:
            arrays.places[:num_awaited] = awaited.places
            arrays.indexes[:num_awaited] = awaited.indexes
        if most_tokens is not None:
            arrays.num_left[: rows.num_rows] = most_tokens
        if draws is not None and self._static_draw is not None:
            self._static_draw.pack(draws, arrays.words)
        uploads.send_to(self._memory, arrays.numbers)
        arrived, tables_read = self._arrived[shape], self._tables[: shape.num_rows, :width]
        if resident is None:
            flat = arrived.tables.view(-1)[: arrays.tables.size]
            tables_read.copy_(flat.view(arrays.tables.shape))
        else:
            resident.gather(arrived.row_ids, width, out=tables_read)
        if awaited is not None:
            where = arrived.places[:num_awaited], arrived.indexes[:num_awaited]
            fill_in(arrived.input_ids, awaited, *where)

    def _width_read(self, rows: PassRows, shape: StepShape) -> int:
        """Blocks of a table up to the last token of the longest row, or of the added tokens."""
        added = 0 if shape.is_decode else shape.num_tokens - len(rows.token_ids)
        num_blocks: int = max(rows.block_tables.shape[1], -(-added // self._block_size))
        return min(num_blocks, self._width)

    def _added(self, shape: StepShape, width: int) -> _Arrays:
        """Of added rows and tokens alone, which are greedy."""
        num_rows = shape.num_rows
        starts = np.arange(num_rows + 1) if shape.is_decode else np.zeros(num_rows + 1)
        draw = self._static_draw
        return _Arrays(
            input_ids=np.zeros(shape.num_tokens, np.int64),
            positions=np.zeros(shape.num_tokens, np.int64),
            slots=np.full(shape.num_tokens, -1, np.int64),
            logits_index=np.zeros(shape.num_lines, np.int64),
            places=np.zeros(num_rows, np.int64),
            indexes=np.zeros(num_rows, np.int64),
            words=np.zeros(0 if draw is None else draw.num_words(shape.num_lines), np.int64),
            row_ids=np.zeros(num_rows, np.int64),
            num_computed=np.zeros(num_rows, np.int32),
            num_left=np.zeros(num_rows, np.int32),
            query_starts=starts.astype(np.int32),
            tables=np.zeros((num_rows, width), np.int32),
        )

    def _views(self, shape: StepShape) -> _Arrived:
        longs, ints = views(self._memory, self._added(shape, self._width).numbers)
        return _Arrived(*longs, *ints)


def _put_rows(target: Array, numbers: Array, num_decodes: int, shape: StepShape) -> None:
    """`numbers` [R, ..] of rows, decodes first, to where `shape` has decodes and prompts."""
    target[:num_decodes] = numbers[:num_decodes]
    prompts = numbers[num_decodes:]
    target[shape.num_decodes : shape.num_decodes + len(prompts)] = prompts


def _put_starts(
    target: Int32Array, query_starts: Int64Array, num_decodes: int, shape: StepShape
) -> None:
    """`query_starts` [R + 1]; decodes and prompts that are added have no tokens."""
    target[:num_decodes] = query_starts[:num_decodes]
    target[num_decodes : shape.num_decodes] = num_decodes
    prompts = query_starts[num_decodes:]
    target[shape.num_decodes : shape.num_decodes + len(prompts)] = prompts
    target[shape.num_decodes + len(prompts) :] = query_starts[-1]


# -- The forms of steps that are recorded, and which of them a step goes into ----------------------
#
# Shape letters: T tokens, D rows of decodes, P rows of prompts, L lines of logits.

# Of steps with prompts; beyond it the device has more to do than the host. With an 8B model on an
# H100 the host took 19 ms to launch 532 tokens, and a recording of 501 took 14.
MAX_PROMPT_SIZE = 1024
_PROMPT_SIZES = (16, *range(32, 257, 32), *range(320, MAX_PROMPT_SIZE + 1, 64))
# More prompts than that in so few tokens are rare; each costs a recording empty programs.
MOST_PROMPTS = 32


Kind = Literal["decode", "prompt"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a recording has room for.

    `num_tokens`: T. `num_decodes`: D rows of one token. `num_prompts`: P rows of any number of
    tokens, behind these, and one more behind them has the tokens that are added; 0 in a recording
    of decodes, whose added rows have a token each. `num_lines`: L.
    """

    num_tokens: int
    num_decodes: int
    num_prompts: int
    num_lines: int

    @property
    def num_rows(self) -> int:
        """Of decodes, prompts, and added tokens."""
        return self.num_decodes + self.num_prompts + (0 if self.is_decode else 1)

    @property
    def is_decode(self) -> bool:
        """Whether there is room for decodes alone."""
        return self.num_prompts == 0

    @property
    def kind(self) -> Kind:
        """Of the steps that it is for: of decodes alone, or not."""
        return "decode" if self.is_decode else "prompt"

    def has_room(self, rows: PassRows) -> bool:
        """For the rows of a pass of this kind, decodes or not."""
        num_decodes = rows.layout.num_decodes
        return (
            len(rows.token_ids) <= self.num_tokens
            and num_decodes <= self.num_decodes
            and rows.num_rows - num_decodes <= self.num_prompts
            and len(rows.logits_index) <= self.num_lines
        )


def decode_shapes(max_num_rows: int) -> list[StepShape]:
    """Rising: close together where a step is short; the last is as large as a step can be.

    1, 2, 4, multiples of 8 up to 256, then of 64 rows.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(320, max_num_rows, 64)]
    sizes = [size for size in sizes if size < max_num_rows] + [max_num_rows]
    return [StepShape(size, size, 0, size) for size in sizes]


def prompt_shapes(max_num_rows: int, max_num_tokens: int) -> list[StepShape]:
    """Returns sizes of recorded steps with prompts, rising, 21 at most; none below 2 tokens."""
    if max_num_tokens < 2:
        return []
    last = min(MAX_PROMPT_SIZE, max_num_tokens)
    sizes = [*(size for size in _PROMPT_SIZES if size < last), last]
    return [
        StepShape(
            num_tokens=size,
            num_decodes=min(size, max_num_rows),
            num_prompts=min(size // 2, max_num_rows, MOST_PROMPTS),
            num_lines=min(size, max_num_rows),
        )
        for size in sizes
    ]


def smallest(shapes: Iterable[StepShape], rows: PassRows) -> StepShape | None:
    """The first of `shapes`, which rise, that the rows of a pass fit into; None if none is."""
    is_decode = rows.is_decode
    fitting = (s for s in shapes if s.is_decode == is_decode and s.has_room(rows))
    return next(fitting, None)
