"""Wrong batches with what contract 1.1 added: adapters, encoder tokens, sliding windows."""

from __future__ import annotations

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.refusal_case import Case, new_rows, set_field, table_writes
from tests.contract.served import NUM_DEVICE_BLOCKS, VOCAB_SIZE
from tests.support.steps.batches import NewRow, Sender, WorkRow, i32

ENCODED = NewRow(2, (5,), cross_blocks=(20, 21), encoder=(1, 2, 3, 4, 5))

# For an executor that announces neither feature.
UNANNOUNCED_CASES = [
    Case(
        "adapter",
        "FEATURE_UNSUPPORTED",
        "new_rows.adapters",
        new_rows(NewRow(2, (5,), adapter="french")),
    ),
    Case(
        "adapter that no row uses",
        "FEATURE_UNSUPPORTED",
        "new_rows.adapters",
        lambda sender: _name_adapters(sender, "french", indexes=(-1,)),
    ),
    Case("encoder tokens", "FEATURE_UNSUPPORTED", "new_rows.num_encoder_tokens", new_rows(ENCODED)),
    Case(
        "encoded tokens",
        "FEATURE_UNSUPPORTED",
        "new_rows.num_encoder_tokens",
        new_rows(NewRow(2, (5,), cross_blocks=(20,), num_encoder=4)),
    ),
    Case(
        "missing block of a new row",
        "BLOCK_OUT_OF_RANGE",
        "new_rows.block_ids",
        new_rows(NewRow(2, (-1, 5))),
    ),
]


def _name_adapters(sender: Sender, *names: str, indexes: tuple[int, ...]) -> pb.ScheduleBatch:
    """Adds row 2 with the adapter columns as they are given."""
    batch = sender.batch(2, base=1, new=[NewRow(2, (5,))])
    batch.new_rows.adapters.extend(names)
    batch.new_rows.adapter_indexes = i32(indexes)
    return batch


def _adapters(
    name: str, field: str, *names: str, indexes: tuple[int, ...] = (0,), reason: str = "MALFORMED"
) -> Case:
    return Case(name, reason, field, lambda sender: _name_adapters(sender, *names, indexes=indexes))


def _cross(name: str, reason: str, field: str, row: NewRow) -> Case:
    return Case(name, reason, f"new_rows.{field}", new_rows(row))


def _set_cross(name: str, field: str, column: bytes) -> Case:
    """One column of a row with encoder tokens is another."""

    def make(sender: Sender) -> pb.ScheduleBatch:
        batch = sender.batch(2, base=1, new=[ENCODED])
        setattr(batch.new_rows, field, column)
        return batch

    return Case(name, "MALFORMED", f"new_rows.{field}", make)


# For an executor that announces all features.
FEATURE_CASES = [
    _adapters("adapter twice", "new_rows.adapters", "a", "b", "a"),
    _adapters("adapter without a name", "new_rows.adapters", "a", ""),
    _adapters("adapter index", "new_rows.adapter_indexes", "a", indexes=(1,)),
    _adapters("adapter index -2", "new_rows.adapter_indexes", "a", indexes=(-2,)),
    _adapters("adapter index without adapters", "new_rows.adapter_indexes"),
    _adapters("long adapter indexes", "new_rows.adapter_indexes", "a", indexes=(0, 0)),
    Case(
        "adapter column",
        "MALFORMED",
        "new_rows.adapter_indexes",
        set_field("new_rows.adapter_indexes", b"123"),
    ),
    Case(
        "too many adapters",
        "LIMIT_EXCEEDED",
        "work.row_ids",
        lambda sender: sender.batch(
            2,
            base=1,
            new=[NewRow(2 + i, (11 + i,), adapter=name) for i, name in enumerate("abc")],
            work=[WorkRow(2 + i, 0, [1]) for i in range(3)],
        ),
    ),
    _cross(
        "cross blocks without encoder tokens",
        "MALFORMED",
        "cross_block_offsets",
        NewRow(2, (5,), cross_blocks=(20,)),
    ),
    _cross(
        "few cross blocks",
        "POSITION_OUT_OF_RANGE",
        "cross_block_offsets",
        NewRow(2, (5,), cross_blocks=(20,), num_encoder=5),
    ),
    _cross(
        "no cross blocks",
        "POSITION_OUT_OF_RANGE",
        "cross_block_offsets",
        NewRow(2, (5,), encoder=(1,)),
    ),
    _cross(
        "cross block",
        "BLOCK_OUT_OF_RANGE",
        "cross_block_ids",
        NewRow(2, (5,), cross_blocks=(NUM_DEVICE_BLOCKS,), encoder=(1,)),
    ),
    _cross(
        "missing cross block",
        "BLOCK_OUT_OF_RANGE",
        "cross_block_ids",
        NewRow(2, (5,), cross_blocks=(-1, 20), num_encoder=5),
    ),
    _cross(
        "some of the encoder tokens",
        "MALFORMED",
        "encoder_offsets",
        NewRow(2, (5,), cross_blocks=(20,), encoder=(1, 2), num_encoder=3),
    ),
    _cross(
        "encoder tokens of a row without any",
        "MALFORMED",
        "encoder_offsets",
        NewRow(2, (5,), encoder=(1, 2), num_encoder=0),
    ),
    _cross(
        "encoder token",
        "TOKEN_OUT_OF_RANGE",
        "encoder_token_ids",
        NewRow(2, (5,), cross_blocks=(20,), encoder=(VOCAB_SIZE,)),
    ),
    _cross(
        "negative number of encoder tokens",
        "MALFORMED",
        "num_encoder_tokens",
        NewRow(2, (5,), num_encoder=-1),
    ),
    _set_cross("long numbers of encoder tokens", "num_encoder_tokens", i32([5, 5])),
    _set_cross("numbers of encoder tokens as no column", "num_encoder_tokens", b"1"),
    _set_cross("cross offsets beyond the data", "cross_block_offsets", i32([0, 3])),
    _set_cross("cross offsets of two rows", "cross_block_offsets", i32([0, 1, 2])),
    _set_cross("no cross offsets", "cross_block_offsets", b""),
    _set_cross("encoder offsets from 1", "encoder_offsets", i32([1, 5])),
    _set_cross("no encoder offsets", "encoder_offsets", b""),
]

# For an executor whose model has a window of 5 tokens; row 0 has computed positions 0 .. 5.
WINDOW_CASES = [
    Case("block -2", "BLOCK_OUT_OF_RANGE", "new_rows.block_ids", new_rows(NewRow(2, (-2, 5)))),
    Case(
        "block -2 of a write",
        "BLOCK_OUT_OF_RANGE",
        "table_writes.block_ids",
        table_writes((0, 0, (-2,))),
    ),
    Case(
        "missing block that is read",
        "BLOCK_OUT_OF_RANGE",
        "work.row_ids",
        lambda sender: sender.batch(2, base=1, new=[NewRow(2, (-1, 5))], work=[WorkRow(2, 7, [1])]),
    ),
    Case(
        "missing block that is written",
        "BLOCK_OUT_OF_RANGE",
        "work.row_ids",
        lambda sender: sender.batch(
            2, base=1, new=[NewRow(2, (5, 6, -1))], work=[WorkRow(2, 7, [1, 2])]
        ),
    ),
    Case(
        "missing block in between",
        "BLOCK_OUT_OF_RANGE",
        "work.row_ids",
        lambda sender: sender.batch(
            2, base=1, new=[NewRow(2, (5, -1, 6))], work=[WorkRow(2, 0, [1] * 9)]
        ),
    ),
    Case(
        "block that a write takes away",
        "BLOCK_OUT_OF_RANGE",
        "work.row_ids",
        lambda sender: sender.batch(2, base=1, writes=[(0, 0, (-1,))], work=[WorkRow(0, 6, [1])]),
    ),
    Case(
        "block of a snapshot",
        "BLOCK_OUT_OF_RANGE",
        "work.row_ids",
        lambda sender: sender.batch(2, new=[NewRow(0, (-1, 1))], work=[WorkRow(0, 6, [1])]),
    ),
]
