"""Tables of wrong batches, and how each is refused.

Each is a delta on step 1, after which rows 0 (blocks 0, 1, 2) and 1 (block 10) exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_ROWS,
    NUM_DEVICE_BLOCKS,
    NUM_HOST_BLOCKS,
    PROMPT,
    VOCAB_SIZE,
)
from tests.support.steps.batches import NewRow, Sender, WorkRow, i32, i64

MALFORMED, UNSUPPORTED, UNKNOWN = "MALFORMED", "FEATURE_UNSUPPORTED", "ROW_UNKNOWN"
LIMIT, OVERLAP = "LIMIT_EXCEEDED", "BLOCK_OVERLAP"
BLOCK, POSITION, TOKEN = "BLOCK_OUT_OF_RANGE", "POSITION_OUT_OF_RANGE", "TOKEN_OUT_OF_RANGE"

# Arguments of `Sender.batch`.
Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A wrong batch: arguments of `Sender.batch`, and fields that are then set to other values."""

    name: str
    reason: str
    field: str
    batch: Batch
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, sender: Sender) -> pb.ScheduleBatch:
        """The batch."""
        batch = sender.batch(2, **{"base": 1, **self.batch})
        for path, value in self.changes.items():
            *parents, name = path.split(".")
            message: Any = batch
            for parent in parents:
                message = getattr(message, parent)
            if isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        return batch


def cases(
    reason: str, *rows: tuple[str, str, Batch | bytes], column_of: Batch | None = None
) -> list[Case]:
    """Cases of one reason. A column as the third value replaces that field of `column_of`."""
    return [
        Case(name, reason, path, column_of or _EVERYTHING, {path: batch})
        if isinstance(batch, bytes)
        else Case(name, reason, path, batch)
        for name, path, batch in rows
    ]


def params(reason: str, *rows: tuple[str, str, Mapping[str, Any]]) -> list[Case]:
    """Cases of new rows with these sampling params; the field is one of the params."""
    return [
        Case(name, reason, f"{_PARAMS}.{path}", new(NewRow(2, (5,), params=dict(values))))
        for name, path, values in rows
    ]


def new(*rows: NewRow) -> Batch:
    return {"new": rows}


def work(*rows: WorkRow) -> Batch:
    return {"work": rows}


def writes(*rows: tuple[int, int, tuple[int, ...]]) -> Batch:
    """Row, start, blocks."""
    return {"writes": rows}


_PARAMS = "new_rows.sampling_params[0]"
_EVERYTHING: Batch = {
    "removed": [1],
    "new": [NewRow(2, (5,)), NewRow(3, (6,))],
    "writes": [(2, 1, (7,))],
    "swap_out": [(0, 0)],
    "copy": [(0, 9)],
    "work": [WorkRow(2, 0, [1]), WorkRow(3, 0, [2])],
}


# -- contract 1.0 ----------------------------------------------------------------------------------

_INDEXES, _HISTORY = "new_rows.sampling_params_indexes", "new_rows.history_offsets"
_STARTS, _LENGTHS, _BACKS = (
    "work.num_computed_tokens",
    "work.num_new_tokens",
    "work.sampled_steps_back",
)
CASES = [
    *cases(
        MALFORMED,
        # Columns that are none, or not parallel.
        ("no column", "work.row_ids", b"12345"),
        ("no i64 column", "new_rows.seeds", bytes(12)),
        ("short seeds", "new_rows.seeds", i64([1])),
        ("long prompt lengths", "new_rows.num_prompt_tokens", i32([1, 1, 1])),
        ("short params indexes", _INDEXES, i32([0])),
        ("short work column", _LENGTHS, i32([1])),
        ("short steps back", _BACKS, i32([0])),
        ("short samples", "work.samples", b"\1"),
        ("samples of 2", "work.samples", b"\1\2"),
        ("few tokens", "work.token_ids", i32([1])),
        ("many tokens", "work.token_ids", i32([1, 2, 3])),
        ("short starts", "table_writes.start_indexes", b""),
        ("lone sources", "copy.destination_block_ids", b""),
        # Offsets.
        ("offsets from 1", "new_rows.block_offsets", i32([1, 1, 2])),
        ("falling offsets", "new_rows.block_offsets", i32([0, 3, 2])),
        ("offsets beyond the data", "new_rows.block_offsets", i32([0, 1, 3])),
        ("few offsets", "table_writes.block_offsets", i32([0])),
        ("no history offsets", _HISTORY, b""),
        # Values.
        ("params index", _INDEXES, i32([0, 1])),
        ("negative params index", _INDEXES, i32([0, -1])),
        ("negative steps back", _BACKS, i32([0, -1])),
        ("no new tokens", _LENGTHS, work(WorkRow(0, 6))),
        ("duplicate work row", "work.row_ids", work(WorkRow(0, 6, [1]), WorkRow(0, 7, [1]))),
        ("duplicate new row", "new_rows.row_ids", new(NewRow(2), NewRow(2))),
        ("duplicate write", "table_writes.row_ids", writes((0, 0, (1,)), (0, 1, (2,)))),
        ("duplicate removal", "removed_row_ids", {"removed": [1, 1]}),
        ("removal in a snapshot", "removed_row_ids", {"base": None, "removed": [1]}),
        # Histories.
        ("history that is not needed", _HISTORY, new(NewRow(2, history=[1, 2]))),
        ("history that is missing", _HISTORY, new(NewRow(2, params={"frequency_penalty": 0.5}))),
        (
            "history without its prompt",
            _HISTORY,
            new(NewRow(2, num_prompt=3, history=[1, 2], params={"num_prompt_logprobs": 0})),
        ),
    ),
    Case("tokens without rows", MALFORMED, "work.token_ids", {}, {"work.token_ids": i32([1])}),
    Case(
        "two tokens of a step", MALFORMED, _BACKS, work(WorkRow(0, 6, back=1)), {_LENGTHS: i32([2])}
    ),
    *params(
        MALFORMED,
        ("negative temperature", "temperature", {"temperature": -0.1}),
        ("NaN temperature", "temperature", {"temperature": math.nan}),
        ("top_k 0", "top_k", {"top_k": 0}),
        ("top_p 0", "top_p", {"top_p": 0.0}),
        ("top_p above 1", "top_p", {"top_p": 1.5}),
        ("min_p above 1", "min_p", {"min_p": 1.5}),
        ("repetition penalty 0", "repetition_penalty", {"repetition_penalty": 0.0}),
        ("negative min_tokens", "min_tokens", {"min_tokens": -1}),
        ("negative logprobs", "num_logprobs", {"num_logprobs": -1}),
    ),
    *params(
        TOKEN,
        ("bias outside the vocabulary", "logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}),
        (
            "suppressed outside the vocabulary",
            "suppressed_token_ids",
            {"suppressed_token_ids": [-1]},
        ),
    ),
    *cases(
        TOKEN,
        ("token", "work.token_ids", work(WorkRow(0, 6, [VOCAB_SIZE]))),
        ("negative token", "work.token_ids", work(WorkRow(0, 6, [-1]))),
        (
            "history outside the vocabulary",
            "new_rows.history_token_ids",
            new(NewRow(2, history=[VOCAB_SIZE], params={"presence_penalty": 1.0})),
        ),
    ),
    *cases(
        UNKNOWN,
        ("unknown row", "work.row_ids", work(WorkRow(5, 0, [1]))),
        ("row removed just now", "work.row_ids", {"removed": [1], **work(WorkRow(1, 1, [1]))}),
        ("unknown row to write", "table_writes.row_ids", writes((5, 0, (1,)))),
        ("unknown row to remove", "removed_row_ids", {"removed": [5]}),
    ),
    *cases("ROW_EXISTS", ("row that exists", "new_rows.row_ids", new(NewRow(1)))),
    *cases(
        LIMIT,
        ("row id", "new_rows.row_ids", new(NewRow(MAX_NUM_ROWS))),
        ("negative row id", "work.row_ids", work(WorkRow(-1, 0, [1]))),
        ("too many rows", "work.row_ids", work(*[WorkRow(0, 6, [1])] * (MAX_NUM_ROWS + 1))),
        ("too many tokens", _LENGTHS, work(WorkRow(0, 0, [1] * (MAX_NUM_BATCHED_TOKENS + 1)))),
    ),
    *cases(
        POSITION,
        ("position beyond the table", _STARTS, work(WorkRow(0, 12, [1]))),
        ("last position beyond the table", _STARTS, work(WorkRow(1, 3, [1, 1]))),
        ("largest position", _STARTS, work(WorkRow(0, 2**31 - 1, [1]))),
        ("negative position", _STARTS, work(WorkRow(0, -1, [1]))),
        ("write with a gap", "table_writes.start_indexes", writes((1, 2, (4,)))),
        ("write at -1", "table_writes.start_indexes", writes((1, -1, (4,)))),
    ),
    *cases(
        BLOCK,
        ("block of a new row", "new_rows.block_ids", new(NewRow(2, (NUM_DEVICE_BLOCKS,)))),
        ("block of a write", "table_writes.block_ids", writes((0, 0, (NUM_DEVICE_BLOCKS,)))),
        ("negative block of a write", "table_writes.block_ids", writes((0, 0, (-1,)))),
        ("host block", "swap_in.source_block_ids", {"swap_in": [(NUM_HOST_BLOCKS, 0)]}),
        ("device block", "swap_out.destination_block_ids", {"swap_out": [(0, NUM_HOST_BLOCKS)]}),
        ("source of a copy", "copy.source_block_ids", {"copy": [(-1, 0)]}),
        ("target of a copy", "copy.destination_block_ids", {"copy": [(0, NUM_DEVICE_BLOCKS)]}),
    ),
    *cases(
        OVERLAP,
        *(
            (f"one target of two {name}", f"{name}.destination_block_ids", {name: [(0, 4), (1, 4)]})
            for name in ("swap_out", "swap_in", "copy")
        ),
        ("chain of copies", "copy.destination_block_ids", {"copy": [(0, 4), (4, 5)]}),
        ("copy onto itself", "copy.destination_block_ids", {"copy": [(4, 4)]}),
    ),
]

# -- contract 1.1: adapters, encoder tokens, sliding windows ---------------------------------------

_ADAPTERS, _ADAPTER_INDEXES = "new_rows.adapters", "new_rows.adapter_indexes"
_NUM_ENCODER, _CROSS_OFFSETS = "new_rows.num_encoder_tokens", "new_rows.cross_block_offsets"
_CROSS_BLOCKS, _ENCODER_OFFSETS = "new_rows.cross_block_ids", "new_rows.encoder_offsets"
_ENCODED = NewRow(2, (5,), cross_blocks=(20, 21), encoder=(1, 2, 3, 4, 5))


def _encoded(**fields: Any) -> Batch:  # noqa: ANN401
    return new(NewRow(2, (5,), **fields))


def _adapters(name: str, path: str, *names: str, indexes: tuple[int, ...] = (0,)) -> Case:
    """A new row with the adapter columns as they are given."""
    changes = {_ADAPTERS: list(names), _ADAPTER_INDEXES: i32(indexes)}
    return Case(name, MALFORMED, path, new(NewRow(2, (5,))), changes)


# For an executor that announces only features of sampling.
UNANNOUNCED_CASES = [
    *cases(
        UNSUPPORTED,
        ("adapter", _ADAPTERS, _encoded(adapter="french")),
        ("encoder tokens", _NUM_ENCODER, new(_ENCODED)),
        ("encoded tokens", _NUM_ENCODER, _encoded(cross_blocks=(20,), num_encoder=4)),
    ),
    Case(
        "adapter that no row uses",
        UNSUPPORTED,
        _ADAPTERS,
        new(NewRow(2, (5,))),
        {_ADAPTERS: ["french"], _ADAPTER_INDEXES: i32([-1])},
    ),
    *cases(BLOCK, ("missing block of a new row", "new_rows.block_ids", new(NewRow(2, (-1, 5))))),
]
# For an executor that announces all features.
FEATURE_CASES = [
    _adapters("adapter twice", _ADAPTERS, "a", "b", "a"),
    _adapters("adapter without a name", _ADAPTERS, "a", ""),
    _adapters("adapter index", _ADAPTER_INDEXES, "a", indexes=(1,)),
    _adapters("adapter index -2", _ADAPTER_INDEXES, "a", indexes=(-2,)),
    _adapters("adapter index without adapters", _ADAPTER_INDEXES),
    _adapters("long adapter indexes", _ADAPTER_INDEXES, "a", indexes=(0, 0)),
    *cases(MALFORMED, ("adapter column", _ADAPTER_INDEXES, b"123")),
    *cases(
        LIMIT,
        (
            "too many adapters",
            "work.row_ids",
            {
                "new": [NewRow(2 + i, (11 + i,), adapter=name) for i, name in enumerate("abc")],
                "work": [WorkRow(2 + i, 0, [1]) for i in range(3)],
            },
        ),
    ),
    *cases(
        MALFORMED,
        ("cross blocks without encoder tokens", _CROSS_OFFSETS, _encoded(cross_blocks=(20,))),
        (
            "some of the encoder tokens",
            _ENCODER_OFFSETS,
            _encoded(cross_blocks=(20,), encoder=(1, 2), num_encoder=3),
        ),
        (
            "encoder tokens of a row without any",
            _ENCODER_OFFSETS,
            _encoded(encoder=(1, 2), num_encoder=0),
        ),
        ("negative number of encoder tokens", _NUM_ENCODER, _encoded(num_encoder=-1)),
        ("long numbers of encoder tokens", _NUM_ENCODER, i32([5, 5])),
        ("numbers of encoder tokens as no column", _NUM_ENCODER, b"1"),
        ("cross offsets beyond the data", _CROSS_OFFSETS, i32([0, 3])),
        ("cross offsets of two rows", _CROSS_OFFSETS, i32([0, 1, 2])),
        ("no cross offsets", _CROSS_OFFSETS, b""),
        ("encoder offsets from 1", _ENCODER_OFFSETS, i32([1, 5])),
        ("no encoder offsets", _ENCODER_OFFSETS, b""),
        column_of=new(_ENCODED),
    ),
    *cases(
        POSITION,
        ("few cross blocks", _CROSS_OFFSETS, _encoded(cross_blocks=(20,), num_encoder=5)),
        ("no cross blocks", _CROSS_OFFSETS, _encoded(encoder=(1,))),
    ),
    *cases(
        BLOCK,
        ("cross block", _CROSS_BLOCKS, _encoded(cross_blocks=(NUM_DEVICE_BLOCKS,), encoder=(1,))),
        ("missing cross block", _CROSS_BLOCKS, _encoded(cross_blocks=(-1, 20), num_encoder=5)),
    ),
    *cases(
        TOKEN,
        (
            "encoder token",
            "new_rows.encoder_token_ids",
            _encoded(cross_blocks=(20,), encoder=(VOCAB_SIZE,)),
        ),
    ),
]


def _added(row: NewRow, *tokens: int, start: int, base: int | None = 1) -> Batch:
    """Adds `row` and computes `tokens` of it from position `start` on."""
    return {"base": base, **new(row), **work(WorkRow(row.row_id, start, tokens))}


# For an executor whose model has a window of 5 tokens; row 0 has computed positions 0 .. 5.
WINDOW_CASES = cases(
    BLOCK,
    ("block -2", "new_rows.block_ids", new(NewRow(2, (-2, 5)))),
    ("block -2 of a write", "table_writes.block_ids", writes((0, 0, (-2,)))),
    ("missing block that is read", "work.row_ids", _added(NewRow(2, (-1, 5)), 1, start=7)),
    ("missing block that is written", "work.row_ids", _added(NewRow(2, (5, 6, -1)), 1, 2, start=7)),
    ("missing block in between", "work.row_ids", _added(NewRow(2, (5, -1, 6)), *[1] * 9, start=0)),
    (
        "block that a write takes away",
        "work.row_ids",
        {**writes((0, 0, (-1,))), **work(WorkRow(0, 6, [1]))},
    ),
    ("block of a snapshot", "work.row_ids", _added(NewRow(0, (-1, 1)), 1, start=6, base=None)),
)

# -- contract 1.2: token constraints ---------------------------------------------------------------


def bad_words(*sequences: tuple[int, ...]) -> dict[str, list[pb.TokenSequence]]:
    return {"bad_words_token_ids": [pb.TokenSequence(token_ids=tokens) for tokens in sequences]}


CONSTRAINT_CASES = [
    *params(
        MALFORMED,
        ("NaN bias", "logit_bias[3]", {"logit_bias": {3: math.nan}}),
        ("infinite bias", "logit_bias[3]", {"logit_bias": {3: math.inf}}),
        ("empty bad word", "bad_words_token_ids[1]", bad_words((1,), ())),
    ),
    *params(
        TOKEN,
        ("allowed token", "allowed_token_ids", {"allowed_token_ids": [1, VOCAB_SIZE]}),
        ("token of a bad word", "bad_words_token_ids[1]", bad_words((1,), (-1,))),
    ),
    *cases(
        MALFORMED,
        ("bad words without a history", _HISTORY, new(NewRow(2, (5,), 1, bad_words((1, 2))))),
        (
            "history with short bad words",
            _HISTORY,
            new(NewRow(2, history=[1], params=bad_words((1,)))),
        ),
    ),
]

# -- contract 1.3: grammars ------------------------------------------------------------------------

_REGEX = pb.Grammar(regex="x")


def _choices(*texts: str) -> pb.Grammar:
    return pb.Grammar(choices=pb.Choices(texts=texts))


def _grammar(name: str, path: str, grammar: pb.Grammar, **others: object) -> Case:
    row = NewRow(2, (5,), history=[1], params={"grammar": grammar, **others})
    return Case(name, MALFORMED, f"{_PARAMS}.grammar{path}", new(row))


# Without a history it would be malformed.
UNANNOUNCED_CASES += params(UNSUPPORTED, ("grammar", "grammar", {"grammar": _REGEX}))
GRAMMAR_CASES = [
    _grammar("grammar of no kind", "", pb.Grammar()),
    _grammar("empty schema", ".json_schema", pb.Grammar(json_schema="")),
    _grammar("long grammar", ".lark", pb.Grammar(lark="\u00e9" * 32769)),
    _grammar("no choices", ".choices", _choices()),
    _grammar("empty choice", ".choices", _choices("a", "")),
    _grammar("many choices", ".choices", _choices(*["a"] * 1025)),
    _grammar("long choices", ".choices", _choices(*["a" * 100] * 656)),
    _grammar("grammar with min_tokens", ".regex", _REGEX, min_tokens=1),
    _grammar("grammar with suppressed tokens", ".regex", _REGEX, suppressed_token_ids=[2]),
    *cases(
        MALFORMED,
        ("grammar without a history", _HISTORY, new(NewRow(2, (5,), params={"grammar": _REGEX}))),
    ),
]

# -- contract 1.4: several tokens in one step ------------------------------------------------------

_RUNS, _DRAFTS, _OFFSETS = "work.num_run_on_tokens", "work.draft_token_ids", "work.draft_offsets"
# Row 0 goes on from its prompt; its block table ends at position 11.
_NEXT, _LAST = len(PROMPT), 11
_PLAIN_ROW = work(WorkRow(0, _NEXT, [9]))


def _row(**more: Any) -> Batch:  # noqa: ANN401
    return work(WorkRow(0, _NEXT, [9], **more))


UNANNOUNCED_CASES += [
    *cases(
        UNSUPPORTED,
        ("run", _RUNS, _row(run_on=2)),
        ("run of no tokens", _RUNS, i32([0])),
        ("drafts", _OFFSETS, _row(drafts=(1, 2))),
        column_of=_PLAIN_ROW,
    ),
    *params(UNSUPPORTED, ("stop tokens", "stop_token_ids", {"stop_token_ids": [2]})),
    Case("parts", UNSUPPORTED, "work.reports_parts", _PLAIN_ROW, {"work.reports_parts": True}),
]
SEVERAL_CASES = [
    *cases(
        MALFORMED,
        ("negative run", _RUNS, i32([-1])),
        ("too many runs", _RUNS, i32([1, 1])),
        ("broken run column", _RUNS, b"123"),
        ("run without a sample", _RUNS, _row(run_on=1, samples=False)),
        ("drafts without a sample", _OFFSETS, _row(drafts=(1,), samples=False)),
        ("drafts without offsets", _DRAFTS, i32([1])),
        column_of=_PLAIN_ROW,
    ),
    Case(
        "offsets of other drafts",
        MALFORMED,
        _OFFSETS,
        _PLAIN_ROW,
        {_OFFSETS: i32([0, 2]), _DRAFTS: i32([1])},
    ),
    *cases(
        POSITION,
        ("run beyond the table", _STARTS, _row(run_on=_LAST - _NEXT + 1)),
        ("drafts and run", _STARTS, _row(run_on=_LAST - _NEXT - 1, drafts=(1, 2))),
    ),
    *cases(TOKEN, ("draft", _DRAFTS, _row(drafts=(VOCAB_SIZE,)))),
    *cases(LIMIT, ("too many drafts", _OFFSETS, _row(drafts=(1,) * MAX_NUM_BATCHED_TOKENS))),
    *params(TOKEN, ("stop token", "stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]})),
]
