"""Wrong batches, and how each is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_ROWS,
    NUM_DEVICE_BLOCKS,
    NUM_HOST_BLOCKS,
    VOCAB_SIZE,
)
from tests.support.batches import NewRow, Sender, WorkRow, i32, i64

PARAMS = "new_rows.sampling_params[0]"


@dataclass(frozen=True, slots=True)
class Case:
    """A wrong delta on step 1, after which rows 0 (blocks 0, 1, 2) and 1 (block 10) exist."""

    name: str
    reason: str
    field: str
    make: Callable[[Sender], pb.ScheduleBatch]


def _work(*rows: WorkRow) -> Callable[[Sender], pb.ScheduleBatch]:
    return lambda sender: sender.batch(2, base=1, work=rows)


def _new(*rows: NewRow) -> Callable[[Sender], pb.ScheduleBatch]:
    return lambda sender: sender.batch(2, base=1, new=rows)


def _params(**params: object) -> Callable[[Sender], pb.ScheduleBatch]:
    return _new(NewRow(2, (5,), params=params))


def _writes(*writes: tuple[int, int, tuple[int, ...]]) -> Callable[[Sender], pb.ScheduleBatch]:
    return lambda sender: sender.batch(2, base=1, writes=writes)


def _moves(phase: str, *pairs: tuple[int, int]) -> Callable[[Sender], pb.ScheduleBatch]:
    def make(sender: Sender) -> pb.ScheduleBatch:
        batch = sender.batch(2, base=1)
        moves = getattr(batch, phase)
        moves.source_block_ids = i32(source for source, _ in pairs)
        moves.destination_block_ids = i32(destination for _, destination in pairs)
        return batch

    return make


def _set(path: str, value: object) -> Callable[[Sender], pb.ScheduleBatch]:
    """A batch that does a bit of everything, with one field replaced."""

    def make(sender: Sender) -> pb.ScheduleBatch:
        batch = sender.batch(
            2,
            base=1,
            removed=[1],
            new=[NewRow(2, (5,)), NewRow(3, (6,))],
            writes=[(2, 1, (7,))],
            swap_out=[(0, 0)],
            copy=[(0, 9)],
            work=[WorkRow(2, 0, [1]), WorkRow(3, 0, [2])],
        )
        *parents, name = path.split(".")
        message: object = batch
        for parent in parents:
            message = getattr(message, parent)
        setattr(message, name, value)
        return batch

    return make


def _spread(batch: pb.ScheduleBatch) -> pb.ScheduleBatch:
    batch.work.num_new_tokens = i32([2])
    return batch


CASES = [
    # Columns that are none, or not parallel.
    Case("no column", "MALFORMED", "work.row_ids", _set("work.row_ids", b"12345")),
    Case("no i64 column", "MALFORMED", "new_rows.seeds", _set("new_rows.seeds", bytes(12))),
    Case("short seeds", "MALFORMED", "new_rows.seeds", _set("new_rows.seeds", i64([1]))),
    Case(
        "long prompt lengths",
        "MALFORMED",
        "new_rows.num_prompt_tokens",
        _set("new_rows.num_prompt_tokens", i32([1, 1, 1])),
    ),
    Case(
        "short params indexes",
        "MALFORMED",
        "new_rows.sampling_params_indexes",
        _set("new_rows.sampling_params_indexes", i32([0])),
    ),
    Case(
        "short work column",
        "MALFORMED",
        "work.num_new_tokens",
        _set("work.num_new_tokens", i32([1])),
    ),
    Case(
        "short steps back",
        "MALFORMED",
        "work.sampled_steps_back",
        _set("work.sampled_steps_back", i32([0])),
    ),
    Case("short samples", "MALFORMED", "work.samples", _set("work.samples", b"\1")),
    Case("samples of 2", "MALFORMED", "work.samples", _set("work.samples", b"\1\2")),
    Case("few tokens", "MALFORMED", "work.token_ids", _set("work.token_ids", i32([1]))),
    Case("many tokens", "MALFORMED", "work.token_ids", _set("work.token_ids", i32([1, 2, 3]))),
    Case(
        "short starts",
        "MALFORMED",
        "table_writes.start_indexes",
        _set("table_writes.start_indexes", b""),
    ),
    Case(
        "lone sources",
        "MALFORMED",
        "copy.destination_block_ids",
        _set("copy.destination_block_ids", b""),
    ),
    Case(
        "tokens without rows",
        "MALFORMED",
        "work.token_ids",
        lambda sender: pb.ScheduleBatch(
            scheduler_epoch=sender.scheduler_epoch,
            executor_epoch=sender.executor_epoch,
            step_id=2,
            base_step_id=1,
            work=pb.Work(token_ids=i32([1])),
        ),
    ),
    # Offsets.
    Case(
        "offsets from 1",
        "MALFORMED",
        "new_rows.block_offsets",
        _set("new_rows.block_offsets", i32([1, 1, 2])),
    ),
    Case(
        "falling offsets",
        "MALFORMED",
        "new_rows.block_offsets",
        _set("new_rows.block_offsets", i32([0, 3, 2])),
    ),
    Case(
        "offsets beyond the data",
        "MALFORMED",
        "new_rows.block_offsets",
        _set("new_rows.block_offsets", i32([0, 1, 3])),
    ),
    Case(
        "few offsets",
        "MALFORMED",
        "table_writes.block_offsets",
        _set("table_writes.block_offsets", i32([0])),
    ),
    Case(
        "no history offsets",
        "MALFORMED",
        "new_rows.history_offsets",
        _set("new_rows.history_offsets", b""),
    ),
    # Values.
    Case(
        "params index",
        "MALFORMED",
        "new_rows.sampling_params_indexes",
        _set("new_rows.sampling_params_indexes", i32([0, 1])),
    ),
    Case(
        "negative params index",
        "MALFORMED",
        "new_rows.sampling_params_indexes",
        _set("new_rows.sampling_params_indexes", i32([0, -1])),
    ),
    Case("no new tokens", "MALFORMED", "work.num_new_tokens", _work(WorkRow(0, 6))),
    Case(
        "negative steps back",
        "MALFORMED",
        "work.sampled_steps_back",
        _set("work.sampled_steps_back", i32([0, -1])),
    ),
    Case(
        "two tokens of a step",
        "MALFORMED",
        "work.sampled_steps_back",
        lambda sender: _spread(sender.batch(2, base=1, work=[WorkRow(0, 6, back=1)])),
    ),
    Case(
        "duplicate work row",
        "MALFORMED",
        "work.row_ids",
        _work(WorkRow(0, 6, [1]), WorkRow(0, 7, [1])),
    ),
    Case("duplicate new row", "MALFORMED", "new_rows.row_ids", _new(NewRow(2), NewRow(2))),
    Case(
        "duplicate write",
        "MALFORMED",
        "table_writes.row_ids",
        _writes((0, 0, (1,)), (0, 1, (2,))),
    ),
    Case(
        "duplicate removal",
        "MALFORMED",
        "removed_row_ids",
        lambda sender: sender.batch(2, base=1, removed=[1, 1]),
    ),
    Case(
        "removal in a snapshot",
        "MALFORMED",
        "removed_row_ids",
        lambda sender: sender.batch(2, removed=[1]),
    ),
    # Histories.
    Case(
        "history that is not needed",
        "MALFORMED",
        "new_rows.history_offsets",
        _new(NewRow(2, history=[1, 2])),
    ),
    Case(
        "history that is missing",
        "MALFORMED",
        "new_rows.history_offsets",
        _params(frequency_penalty=0.5),
    ),
    Case(
        "history without its prompt",
        "MALFORMED",
        "new_rows.history_offsets",
        _new(NewRow(2, num_prompt=3, history=[1, 2], params={"num_prompt_logprobs": 0})),
    ),
    Case(
        "history outside the vocabulary",
        "TOKEN_OUT_OF_RANGE",
        "new_rows.history_token_ids",
        _new(NewRow(2, history=[VOCAB_SIZE], params={"presence_penalty": 1.0})),
    ),
    # Sampling params.
    Case("negative temperature", "MALFORMED", f"{PARAMS}.temperature", _params(temperature=-0.1)),
    Case(
        "NaN temperature", "MALFORMED", f"{PARAMS}.temperature", _params(temperature=float("nan"))
    ),
    Case("top_k 0", "MALFORMED", f"{PARAMS}.top_k", _params(top_k=0)),
    Case("top_p 0", "MALFORMED", f"{PARAMS}.top_p", _params(top_p=0.0)),
    Case("top_p above 1", "MALFORMED", f"{PARAMS}.top_p", _params(top_p=1.5)),
    Case("min_p above 1", "MALFORMED", f"{PARAMS}.min_p", _params(min_p=1.5)),
    Case(
        "repetition penalty 0",
        "MALFORMED",
        f"{PARAMS}.repetition_penalty",
        _params(repetition_penalty=0.0),
    ),
    Case("negative min_tokens", "MALFORMED", f"{PARAMS}.min_tokens", _params(min_tokens=-1)),
    Case("negative logprobs", "MALFORMED", f"{PARAMS}.num_logprobs", _params(num_logprobs=-1)),
    Case(
        "bias outside the vocabulary",
        "TOKEN_OUT_OF_RANGE",
        f"{PARAMS}.logit_bias",
        _params(logit_bias={VOCAB_SIZE: 1.0}),
    ),
    Case(
        "suppressed outside the vocabulary",
        "TOKEN_OUT_OF_RANGE",
        f"{PARAMS}.suppressed_token_ids",
        _params(suppressed_token_ids=[-1]),
    ),
    # Rows.
    Case("unknown row", "ROW_UNKNOWN", "work.row_ids", _work(WorkRow(5, 0, [1]))),
    Case(
        "row removed just now",
        "ROW_UNKNOWN",
        "work.row_ids",
        lambda sender: sender.batch(2, base=1, removed=[1], work=[WorkRow(1, 1, [1])]),
    ),
    Case("unknown row to write", "ROW_UNKNOWN", "table_writes.row_ids", _writes((5, 0, (1,)))),
    Case(
        "unknown row to remove",
        "ROW_UNKNOWN",
        "removed_row_ids",
        lambda sender: sender.batch(2, base=1, removed=[5]),
    ),
    Case("row that exists", "ROW_EXISTS", "new_rows.row_ids", _new(NewRow(1))),
    Case("row id", "LIMIT_EXCEEDED", "new_rows.row_ids", _new(NewRow(MAX_NUM_ROWS))),
    Case("negative row id", "LIMIT_EXCEEDED", "work.row_ids", _work(WorkRow(-1, 0, [1]))),
    Case(
        "too many rows",
        "LIMIT_EXCEEDED",
        "work.row_ids",
        _work(*[WorkRow(0, 6, [1])] * (MAX_NUM_ROWS + 1)),
    ),
    Case(
        "too many tokens",
        "LIMIT_EXCEEDED",
        "work.num_new_tokens",
        _work(WorkRow(0, 0, [1] * (MAX_NUM_BATCHED_TOKENS + 1))),
    ),
    # Positions.
    Case(
        "position beyond the table",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        _work(WorkRow(0, 12, [1])),
    ),
    Case(
        "last position beyond the table",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        _work(WorkRow(1, 3, [1, 1])),
    ),
    Case(
        "largest position",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        _work(WorkRow(0, 2**31 - 1, [1])),
    ),
    Case(
        "negative position",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        _work(WorkRow(0, -1, [1])),
    ),
    Case(
        "write with a gap",
        "POSITION_OUT_OF_RANGE",
        "table_writes.start_indexes",
        _writes((1, 2, (4,))),
    ),
    Case(
        "write at -1",
        "POSITION_OUT_OF_RANGE",
        "table_writes.start_indexes",
        _writes((1, -1, (4,))),
    ),
    # Tokens.
    Case("token", "TOKEN_OUT_OF_RANGE", "work.token_ids", _work(WorkRow(0, 6, [VOCAB_SIZE]))),
    Case("negative token", "TOKEN_OUT_OF_RANGE", "work.token_ids", _work(WorkRow(0, 6, [-1]))),
    # Blocks.
    Case(
        "block of a new row",
        "BLOCK_OUT_OF_RANGE",
        "new_rows.block_ids",
        _new(NewRow(2, (NUM_DEVICE_BLOCKS,))),
    ),
    Case(
        "block of a write",
        "BLOCK_OUT_OF_RANGE",
        "table_writes.block_ids",
        _writes((0, 0, (NUM_DEVICE_BLOCKS,))),
    ),
    Case(
        "negative block of a write",
        "BLOCK_OUT_OF_RANGE",
        "table_writes.block_ids",
        _writes((0, 0, (-1,))),
    ),
    Case(
        "host block as device block",
        "BLOCK_OUT_OF_RANGE",
        "swap_in.source_block_ids",
        _moves("swap_in", (NUM_HOST_BLOCKS, 0)),
    ),
    Case(
        "device block as host block",
        "BLOCK_OUT_OF_RANGE",
        "swap_out.destination_block_ids",
        _moves("swap_out", (0, NUM_HOST_BLOCKS)),
    ),
    Case(
        "source of a copy",
        "BLOCK_OUT_OF_RANGE",
        "copy.source_block_ids",
        _moves("copy", (-1, 0)),
    ),
    Case(
        "destination of a copy",
        "BLOCK_OUT_OF_RANGE",
        "copy.destination_block_ids",
        _moves("copy", (0, NUM_DEVICE_BLOCKS)),
    ),
    *[
        Case(
            f"two sources for one destination of {phase}",
            "BLOCK_OVERLAP",
            f"{phase}.destination_block_ids",
            _moves(phase, (0, 4), (1, 4)),
        )
        for phase in ("swap_out", "swap_in", "copy")
    ],
    Case(
        "chain of copies",
        "BLOCK_OVERLAP",
        "copy.destination_block_ids",
        _moves("copy", (0, 4), (4, 5)),
    ),
    Case("copy onto itself", "BLOCK_OVERLAP", "copy.destination_block_ids", _moves("copy", (4, 4))),
]
