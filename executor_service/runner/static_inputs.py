"""Input memory of recorded steps, and the shapes of steps that are recorded.

Shape letters: T tokens and L lines of logits of a shape, N rows of a shape, R rows of a step, W
blocks of the longest block table that is read, A tiles of tokens with adapters, B of such lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from executor_service.device import (
    Array,
    Int32Array,
    Int64Array,
    IntegerArrays,
    KVCache,
    Uploads,
    views,
)
from executor_service.model import AdapterSlots, PassRows, PassTensors, PassTiles, fill_in
from executor_service.sampling import StaticDraw
from splitserve_kernels.adapter_tiles import TokenTiles, lay_out_tiles, most_tiles
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.paged_batch import PagedBatch


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Host arrays of a step of one shape, as they are copied to the device.

    `input_ids`, `positions`, `slots`: [T]. `logits_index`: [L]. `input_indexes`, `indexes`: [N], of
    awaited input tokens. `words`: packed draws. `row_ids`: [N], used if the device keeps the block
    tables; otherwise `tables`: [N, W], which has no columns in the first case. `num_computed`: [N].
    `num_left`: [N], tokens that rows of a decode may get; 0 if only one is drawn anyway.
    `query_starts`: [N + 1]. `order`, `tiles`: [T], [3, A], of tokens that have an adapter;
    `order_of_lines`, `tiles_of_lines`: [L], [3, B]; all of them empty where no step has any.
    """

    input_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    logits_index: Int64Array
    input_indexes: Int64Array
    indexes: Int64Array
    words: Int64Array
    row_ids: Int64Array
    num_computed: Int32Array
    num_left: Int32Array
    query_starts: Int32Array
    order: Int32Array
    tiles: Int32Array
    order_of_lines: Int32Array
    tiles_of_lines: Int32Array
    tables: Int32Array

    @property
    def numbers(self) -> IntegerArrays:
        """Arrays in copy order; tables come last, so table width shifts no other array."""
        longs = [self.input_ids, self.positions, self.slots, self.logits_index]
        longs += [self.input_indexes, self.indexes, self.words, self.row_ids]
        ints = [self.num_computed, self.num_left, self.query_starts, self.order, self.tiles]
        ints += [self.order_of_lines, self.tiles_of_lines, self.tables]
        return IntegerArrays(longs, ints)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """`_Arrays` on the device; `tables` is a view of the memory for all rows at full width."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    logits_index: Tensor
    input_indexes: Tensor
    indexes: Tensor
    words: Tensor
    row_ids: Tensor
    num_computed: Tensor
    num_left: Tensor
    query_starts: Tensor
    order: Tensor
    tiles: Tensor
    order_of_lines: Tensor
    tiles_of_lines: Tensor
    tables: Tensor


class StaticInputs:
    """Device memory for steps of some shapes, one step at a time: all shapes share the memory."""

    def __init__(
        self,
        shapes: Sequence[StepShape],
        max_model_len: int,
        cache: KVCache,
        static_draw: StaticDraw | None = None,
        slots: AdapterSlots | None = None,
    ) -> None:
        """Allocates the memory. It holds no step until `fill` is called.

        `static_draw`: draws tokens in the recordings; None if draws are not recorded. `slots`: of
        adapters that rows of decodes may have; None if rows have none.
        """
        self._static_draw = static_draw
        self._slots = slots
        self._block_size = cache.block_size
        self._width = -(-max_model_len // cache.block_size)
        self._max_num_tokens = self._width * cache.block_size
        # A step arrives here in one copy, with its tables packed at their own width.
        num_bytes = max(self._added(shape, self._width).numbers.num_bytes for shape in shapes)
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=cache.device)
        most_rows = max(shape.num_rows for shape in shapes)
        self._tables = self._memory.new_zeros(most_rows, self._width, dtype=torch.int32)
        self._arrived = {shape: self._views(shape) for shape in shapes}

    def tensors(self, shape: StepShape, *, is_adapted: bool = False) -> PassTensors:
        """Returns the inputs of a step of `shape`, as views of the memory.

        `is_adapted`: of a decode whose rows may have adapters.
        """
        arrived, tiles = self._arrived[shape], None
        if is_adapted:
            tiles = PassTiles(
                TokenTiles(arrived.order, arrived.tiles),
                TokenTiles(arrived.order_of_lines, arrived.tiles_of_lines),
            )
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
            arrived.input_ids[None], arrived.positions[None], paged, arrived.logits_index, tiles
        )

    def words(self, shape: StepShape) -> Tensor:
        """Returns the packed draws of the lines of logits of `shape`, a view of the memory."""
        return self._arrived[shape].words

    def num_left(self, shape: StepShape) -> Tensor:
        """Returns how many tokens each row of `shape` may get, a view of the memory."""
        return self._arrived[shape].num_left

    def fill(
        self,
        rows: PassRows,
        shape: StepShape,
        uploads: Uploads,
        draws: DrawRows | None = None,
        most_tokens: Int32Array | None = None,
    ) -> None:
        """Launches the copy of `rows`, for which `shape` has room, into the memory.

        Padding tokens write to no slot; if they have rows, these read block 0. `draws`: how the
        first lines of logits are drawn; None if it makes no difference. `most_tokens`: tokens that
        each row of a decode may get; None if rows do not run on.
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
            # Padding tokens attend, too, else their outputs would be random memory. Tokens beyond
            # the longest block table have no blocks to attend to.
            arrays.query_starts[-1] = min(shape.num_tokens, num_tokens + self._max_num_tokens)
        num_awaited = 0 if awaited is None else len(awaited.input_indexes)
        if awaited is not None:
            arrays.input_indexes[:num_awaited] = awaited.input_indexes
            arrays.indexes[:num_awaited] = awaited.indexes
        if most_tokens is not None:
            arrays.num_left[: rows.num_rows] = most_tokens
        if draws is not None and self._static_draw is not None:
            self._static_draw.pack(draws, arrays.words)
        if rows.adapted is not None and self._slots is not None:
            of_token = self._slots.slots_of(rows.adapted)
            _put_tiles(arrays.order, arrays.tiles, of_token)
            _put_tiles(arrays.order_of_lines, arrays.tiles_of_lines, of_token[rows.logits_index])
        uploads.send_to(self._memory, arrays.numbers)
        arrived, tables_read = self._arrived[shape], self._tables[: shape.num_rows, :width]
        if resident is None:
            flat = arrived.tables.view(-1)[: arrays.tables.size]
            tables_read.copy_(flat.view(arrays.tables.shape))
        else:
            resident.gather(arrived.row_ids, width, out=tables_read)
        if awaited is not None:
            where = arrived.input_indexes[:num_awaited], arrived.indexes[:num_awaited]
            fill_in(arrived.input_ids, awaited, *where)

    def _width_read(self, rows: PassRows, shape: StepShape) -> int:
        """Returns the blocks of a table up to the last token of the longest row, or of padding."""
        added = 0 if shape.is_decode else shape.num_tokens - len(rows.token_ids)
        num_blocks: int = max(rows.block_tables.shape[1], -(-added // self._block_size))
        return min(num_blocks, self._width)

    def _added(self, shape: StepShape, width: int) -> _Arrays:
        """Returns arrays that hold padding rows and tokens only, which are greedy."""
        num_rows = shape.num_rows
        starts = np.arange(num_rows + 1) if shape.is_decode else np.zeros(num_rows + 1)
        draw = self._static_draw
        num_adapted, num_adapted_lines, num_slots = 0, 0, 0
        if self._slots is not None and shape.is_decode:
            num_adapted, num_adapted_lines = shape.num_tokens, shape.num_lines
            num_slots = self._slots.limits.max_num
        return _Arrays(
            input_ids=np.zeros(shape.num_tokens, np.int64),
            positions=np.zeros(shape.num_tokens, np.int64),
            slots=np.full(shape.num_tokens, -1, np.int64),
            logits_index=np.zeros(shape.num_lines, np.int64),
            input_indexes=np.zeros(num_rows, np.int64),
            indexes=np.zeros(num_rows, np.int64),
            words=np.zeros(0 if draw is None else draw.num_words(shape.num_lines), np.int64),
            row_ids=np.zeros(num_rows, np.int64),
            num_computed=np.zeros(num_rows, np.int32),
            num_left=np.zeros(num_rows, np.int32),
            query_starts=starts.astype(np.int32),
            order=np.zeros(num_adapted, np.int32),
            tiles=np.zeros((3, most_tiles(num_adapted, num_slots)), np.int32),
            order_of_lines=np.zeros(num_adapted_lines, np.int32),
            tiles_of_lines=np.zeros((3, most_tiles(num_adapted_lines, num_slots)), np.int32),
            tables=np.zeros((num_rows, width), np.int32),
        )

    def _views(self, shape: StepShape) -> _Arrived:
        longs, ints = views(self._memory, self._added(shape, self._width).numbers)
        return _Arrived(*longs, *ints)


def _put_rows(target: Array, numbers: Array, num_decodes: int, shape: StepShape) -> None:
    """Copies `numbers` [R, ..] of rows, decodes first, to the decodes and prompts of `shape`."""
    target[:num_decodes] = numbers[:num_decodes]
    prompts = numbers[num_decodes:]
    target[shape.num_decodes : shape.num_decodes + len(prompts)] = prompts


def _put_tiles(order: Int32Array, tiles: Int32Array, slot_of_token: Int32Array) -> None:
    """Writes the tiles of tokens that have adapters, -1 for none in `slot_of_token`."""
    order[:], tiles[:] = lay_out_tiles(slot_of_token, len(order), tiles.shape[1])


def _put_starts(
    target: Int32Array, query_starts: Int64Array, num_decodes: int, shape: StepShape
) -> None:
    """Copies `query_starts` [R + 1]; padding decodes and prompts get no tokens."""
    target[:num_decodes] = query_starts[:num_decodes]
    target[num_decodes : shape.num_decodes] = num_decodes
    prompts = query_starts[num_decodes:]
    target[shape.num_decodes : shape.num_decodes + len(prompts)] = prompts
    target[shape.num_decodes + len(prompts) :] = query_starts[-1]


# -- Shapes of recorded steps ----------------------------------------------------------------------
#
# Shape letters: T tokens, D rows of decodes, P rows of prompts, L lines of logits.

# Largest recorded step with prompts, in tokens; beyond it the device has more to do than the host.
# With an 8B model on an H100 the host took 19 ms to launch 532 tokens, and a recording of 501 took
# 14 ms.
MAX_PROMPT_SIZE = 1024
_PROMPT_SIZES = (16, *range(32, 257, 32), *range(320, MAX_PROMPT_SIZE + 1, 64))
# Most prompts of a shape: more in so few tokens are rare, and each costs empty kernel programs.
MOST_PROMPTS = 32


# "adapted": decodes whose rows may have adapters.
Kind = Literal["decode", "prompt", "adapted"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes for which a recording has room.

    `num_tokens`: T. `num_decodes`: D rows of one token. `num_prompts`: P rows of any number of
    tokens, after the decodes; one more row after them holds the padding tokens. P is 0 in a
    recording of decodes, whose padding rows have one token each. `num_lines`: L.
    """

    num_tokens: int
    num_decodes: int
    num_prompts: int
    num_lines: int

    @property
    def num_rows(self) -> int:
        """Number of rows: decodes, prompts, and one of padding tokens if there are prompts."""
        return self.num_decodes + self.num_prompts + (0 if self.is_decode else 1)

    @property
    def is_decode(self) -> bool:
        """Whether the shape has room for decodes only."""
        return self.num_prompts == 0

    @property
    def kind(self) -> Kind:
        """Kind of the steps that fit: decodes only, or with prompts."""
        return "decode" if self.is_decode else "prompt"

    def has_room(self, rows: PassRows) -> bool:
        """Returns whether the rows of a pass of this kind fit."""
        num_decodes = rows.layout.num_decodes
        return (
            len(rows.token_ids) <= self.num_tokens
            and num_decodes <= self.num_decodes
            and rows.num_rows - num_decodes <= self.num_prompts
            and len(rows.logits_index) <= self.num_lines
        )


def decode_shapes(max_num_rows: int) -> list[StepShape]:
    """Returns shapes of recorded decodes, rising; the last is as large as a step can be.

    Their sizes are 1, 2, 4, multiples of 8 up to 256, then of 64 rows: close together where a step
    is short.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(320, max_num_rows, 64)]
    sizes = [size for size in sizes if size < max_num_rows] + [max_num_rows]
    return [StepShape(size, size, 0, size) for size in sizes]


def adapted_shapes(shapes: Iterable[StepShape]) -> list[StepShape]:
    """Returns the decodes among the rising `shapes` that are recorded with adapters, too.

    They are powers of two and the largest: each recording takes time at the start.
    """
    decodes = [shape for shape in shapes if shape.is_decode]
    return [s for s in decodes if s.num_rows.bit_count() == 1 or s is decodes[-1]]


def prompt_shapes(max_num_rows: int, max_num_tokens: int) -> list[StepShape]:
    """Returns shapes of recorded steps with prompts, rising, 21 at most; none below 2 tokens."""
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
    """Returns the first of the rising `shapes` that the rows of a pass fit into.

    Returns None if none fits.
    """
    is_decode = rows.is_decode
    fitting = (s for s in shapes if s.is_decode == is_decode and s.has_room(rows))
    return next(fitting, None)
