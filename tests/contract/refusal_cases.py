"""Wrong batches, and how each is refused."""

from __future__ import annotations

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.refusal_case import Case, moves, new_rows, params, set_field, table_writes, work
from tests.contract.served import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_ROWS,
    NUM_DEVICE_BLOCKS,
    NUM_HOST_BLOCKS,
    VOCAB_SIZE,
)
from tests.support.steps.batches import NewRow, WorkRow, i32, i64

PARAMS = "new_rows.sampling_params[0]"


def _spread(batch: pb.ScheduleBatch) -> pb.ScheduleBatch:
    batch.work.num_new_tokens = i32([2])
    return batch


CASES = [
    # Columns that are none, or not parallel.
    Case("no column", "MALFORMED", "work.row_ids", set_field("work.row_ids", b"12345")),
    Case("no i64 column", "MALFORMED", "new_rows.seeds", set_field("new_rows.seeds", bytes(12))),
    Case("short seeds", "MALFORMED", "new_rows.seeds", set_field("new_rows.seeds", i64([1]))),
    Case(
        "long prompt lengths",
        "MALFORMED",
        "new_rows.num_prompt_tokens",
        set_field("new_rows.num_prompt_tokens", i32([1, 1, 1])),
    ),
    Case(
        "short params indexes",
        "MALFORMED",
        "new_rows.sampling_params_indexes",
        set_field("new_rows.sampling_params_indexes", i32([0])),
    ),
    Case(
        "short work column",
        "MALFORMED",
        "work.num_new_tokens",
        set_field("work.num_new_tokens", i32([1])),
    ),
    Case(
        "short steps back",
        "MALFORMED",
        "work.sampled_steps_back",
        set_field("work.sampled_steps_back", i32([0])),
    ),
    Case("short samples", "MALFORMED", "work.samples", set_field("work.samples", b"\1")),
    Case("samples of 2", "MALFORMED", "work.samples", set_field("work.samples", b"\1\2")),
    Case("few tokens", "MALFORMED", "work.token_ids", set_field("work.token_ids", i32([1]))),
    Case("many tokens", "MALFORMED", "work.token_ids", set_field("work.token_ids", i32([1, 2, 3]))),
    Case(
        "short starts",
        "MALFORMED",
        "table_writes.start_indexes",
        set_field("table_writes.start_indexes", b""),
    ),
    Case(
        "lone sources",
        "MALFORMED",
        "copy.destination_block_ids",
        set_field("copy.destination_block_ids", b""),
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
        set_field("new_rows.block_offsets", i32([1, 1, 2])),
    ),
    Case(
        "falling offsets",
        "MALFORMED",
        "new_rows.block_offsets",
        set_field("new_rows.block_offsets", i32([0, 3, 2])),
    ),
    Case(
        "offsets beyond the data",
        "MALFORMED",
        "new_rows.block_offsets",
        set_field("new_rows.block_offsets", i32([0, 1, 3])),
    ),
    Case(
        "few offsets",
        "MALFORMED",
        "table_writes.block_offsets",
        set_field("table_writes.block_offsets", i32([0])),
    ),
    Case(
        "no history offsets",
        "MALFORMED",
        "new_rows.history_offsets",
        set_field("new_rows.history_offsets", b""),
    ),
    # Values.
    Case(
        "params index",
        "MALFORMED",
        "new_rows.sampling_params_indexes",
        set_field("new_rows.sampling_params_indexes", i32([0, 1])),
    ),
    Case(
        "negative params index",
        "MALFORMED",
        "new_rows.sampling_params_indexes",
        set_field("new_rows.sampling_params_indexes", i32([0, -1])),
    ),
    Case("no new tokens", "MALFORMED", "work.num_new_tokens", work(WorkRow(0, 6))),
    Case(
        "negative steps back",
        "MALFORMED",
        "work.sampled_steps_back",
        set_field("work.sampled_steps_back", i32([0, -1])),
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
        work(WorkRow(0, 6, [1]), WorkRow(0, 7, [1])),
    ),
    Case("duplicate new row", "MALFORMED", "new_rows.row_ids", new_rows(NewRow(2), NewRow(2))),
    Case(
        "duplicate write",
        "MALFORMED",
        "table_writes.row_ids",
        table_writes((0, 0, (1,)), (0, 1, (2,))),
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
        new_rows(NewRow(2, history=[1, 2])),
    ),
    Case(
        "history that is missing",
        "MALFORMED",
        "new_rows.history_offsets",
        params(frequency_penalty=0.5),
    ),
    Case(
        "history without its prompt",
        "MALFORMED",
        "new_rows.history_offsets",
        new_rows(NewRow(2, num_prompt=3, history=[1, 2], params={"num_prompt_logprobs": 0})),
    ),
    Case(
        "history outside the vocabulary",
        "TOKEN_OUT_OF_RANGE",
        "new_rows.history_token_ids",
        new_rows(NewRow(2, history=[VOCAB_SIZE], params={"presence_penalty": 1.0})),
    ),
    # Sampling params.
    Case("negative temperature", "MALFORMED", f"{PARAMS}.temperature", params(temperature=-0.1)),
    Case("NaN temperature", "MALFORMED", f"{PARAMS}.temperature", params(temperature=float("nan"))),
    Case("top_k 0", "MALFORMED", f"{PARAMS}.top_k", params(top_k=0)),
    Case("top_p 0", "MALFORMED", f"{PARAMS}.top_p", params(top_p=0.0)),
    Case("top_p above 1", "MALFORMED", f"{PARAMS}.top_p", params(top_p=1.5)),
    Case("min_p above 1", "MALFORMED", f"{PARAMS}.min_p", params(min_p=1.5)),
    Case(
        "repetition penalty 0",
        "MALFORMED",
        f"{PARAMS}.repetition_penalty",
        params(repetition_penalty=0.0),
    ),
    Case("negative min_tokens", "MALFORMED", f"{PARAMS}.min_tokens", params(min_tokens=-1)),
    Case("negative logprobs", "MALFORMED", f"{PARAMS}.num_logprobs", params(num_logprobs=-1)),
    Case(
        "bias outside the vocabulary",
        "TOKEN_OUT_OF_RANGE",
        f"{PARAMS}.logit_bias",
        params(logit_bias={VOCAB_SIZE: 1.0}),
    ),
    Case(
        "suppressed outside the vocabulary",
        "TOKEN_OUT_OF_RANGE",
        f"{PARAMS}.suppressed_token_ids",
        params(suppressed_token_ids=[-1]),
    ),
    # Rows.
    Case("unknown row", "ROW_UNKNOWN", "work.row_ids", work(WorkRow(5, 0, [1]))),
    Case(
        "row removed just now",
        "ROW_UNKNOWN",
        "work.row_ids",
        lambda sender: sender.batch(2, base=1, removed=[1], work=[WorkRow(1, 1, [1])]),
    ),
    Case("unknown row to write", "ROW_UNKNOWN", "table_writes.row_ids", table_writes((5, 0, (1,)))),
    Case(
        "unknown row to remove",
        "ROW_UNKNOWN",
        "removed_row_ids",
        lambda sender: sender.batch(2, base=1, removed=[5]),
    ),
    Case("row that exists", "ROW_EXISTS", "new_rows.row_ids", new_rows(NewRow(1))),
    Case("row id", "LIMIT_EXCEEDED", "new_rows.row_ids", new_rows(NewRow(MAX_NUM_ROWS))),
    Case("negative row id", "LIMIT_EXCEEDED", "work.row_ids", work(WorkRow(-1, 0, [1]))),
    Case(
        "too many rows",
        "LIMIT_EXCEEDED",
        "work.row_ids",
        work(*[WorkRow(0, 6, [1])] * (MAX_NUM_ROWS + 1)),
    ),
    Case(
        "too many tokens",
        "LIMIT_EXCEEDED",
        "work.num_new_tokens",
        work(WorkRow(0, 0, [1] * (MAX_NUM_BATCHED_TOKENS + 1))),
    ),
    # Positions.
    Case(
        "position beyond the table",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        work(WorkRow(0, 12, [1])),
    ),
    Case(
        "last position beyond the table",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        work(WorkRow(1, 3, [1, 1])),
    ),
    Case(
        "largest position",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        work(WorkRow(0, 2**31 - 1, [1])),
    ),
    Case(
        "negative position",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        work(WorkRow(0, -1, [1])),
    ),
    Case(
        "write with a gap",
        "POSITION_OUT_OF_RANGE",
        "table_writes.start_indexes",
        table_writes((1, 2, (4,))),
    ),
    Case(
        "write at -1",
        "POSITION_OUT_OF_RANGE",
        "table_writes.start_indexes",
        table_writes((1, -1, (4,))),
    ),
    # Tokens.
    Case("token", "TOKEN_OUT_OF_RANGE", "work.token_ids", work(WorkRow(0, 6, [VOCAB_SIZE]))),
    Case("negative token", "TOKEN_OUT_OF_RANGE", "work.token_ids", work(WorkRow(0, 6, [-1]))),
    # Blocks.
    Case(
        "block of a new row",
        "BLOCK_OUT_OF_RANGE",
        "new_rows.block_ids",
        new_rows(NewRow(2, (NUM_DEVICE_BLOCKS,))),
    ),
    Case(
        "block of a write",
        "BLOCK_OUT_OF_RANGE",
        "table_writes.block_ids",
        table_writes((0, 0, (NUM_DEVICE_BLOCKS,))),
    ),
    Case(
        "negative block of a write",
        "BLOCK_OUT_OF_RANGE",
        "table_writes.block_ids",
        table_writes((0, 0, (-1,))),
    ),
    Case(
        "host block as device block",
        "BLOCK_OUT_OF_RANGE",
        "swap_in.source_block_ids",
        moves("swap_in", (NUM_HOST_BLOCKS, 0)),
    ),
    Case(
        "device block as host block",
        "BLOCK_OUT_OF_RANGE",
        "swap_out.destination_block_ids",
        moves("swap_out", (0, NUM_HOST_BLOCKS)),
    ),
    Case(
        "source of a copy",
        "BLOCK_OUT_OF_RANGE",
        "copy.source_block_ids",
        moves("copy", (-1, 0)),
    ),
    Case(
        "destination of a copy",
        "BLOCK_OUT_OF_RANGE",
        "copy.destination_block_ids",
        moves("copy", (0, NUM_DEVICE_BLOCKS)),
    ),
    *[
        Case(
            f"two sources for one destination of {phase}",
            "BLOCK_OVERLAP",
            f"{phase}.destination_block_ids",
            moves(phase, (0, 4), (1, 4)),
        )
        for phase in ("swap_out", "swap_in", "copy")
    ],
    Case(
        "chain of copies",
        "BLOCK_OVERLAP",
        "copy.destination_block_ids",
        moves("copy", (0, 4), (4, 5)),
    ),
    Case("copy onto itself", "BLOCK_OVERLAP", "copy.destination_block_ids", moves("copy", (4, 4))),
]
