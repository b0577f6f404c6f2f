"""Input of a forward pass: rows as the host knows them, and tokens that only the device has."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor_service.device import HostStreams, ResidentTables, SampledTokens, Uploads
from executor_service.model import InputBatch, build_input_batch
from executor_service.steps import AwaitedTokens, BlockTables, SamplingParams, StepInput
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE = 4
CPU = torch.device("cpu")
SCORED = SamplingParams(num_prompt_logprobs=0)
ROWS = [
    # A chunk in the middle of a prompt whose tokens are scored.
    Row([11, 12, 13], 2, (5, 7), 9, samples=False, params=SCORED, history=range(9)),
    # A decode.
    Row([21], 6, (0, 3), 4),
    # The last chunk of a scored prompt.
    Row([31, 32, 33, 34], 1, (9, 2), 5, params=SCORED, history=range(5)),
]


def _build(*rows: int) -> InputBatch:
    return build_input_batch(make_step(ROWS), rows, BLOCK_SIZE, torch.device("cpu"))


def test_input_batch_puts_decodes_first() -> None:
    batch = _build(0, 1, 2)
    assert batch.input_ids.tolist() == [[21, 11, 12, 13, 31, 32, 33, 34]]
    assert batch.position_ids.tolist() == [[6, 2, 3, 4, 1, 2, 3, 4]]
    assert batch.paged.query_starts.tolist() == [0, 1, 4, 8]
    assert batch.paged.num_computed_tokens.tolist() == [6, 2, 1]
    assert batch.paged.block_tables.tolist() == [[0, 3], [5, 7], [9, 2]]
    slots = [(3, 2), (5, 2), (5, 3), (7, 0), (9, 1), (9, 2), (9, 3), (2, 0)]
    assert batch.paged.slot_mapping.tolist() == [b * BLOCK_SIZE + offset for b, offset in slots]
    assert (batch.paged.max_num_new_tokens, batch.paged.max_num_tokens) == (4, 7)
    assert batch.paged.num_decodes == 1
    assert not batch.rows.is_decode


def test_input_batch_reads_sampling_rows_first_when_prompts_are_scored() -> None:
    batch = _build(0, 1, 2)
    assert batch.readout.sampling_rows.tolist() == [1, 2]
    assert batch.readout.prompt_rows.tolist() == [0, 0, 0, 2, 2, 2]
    # The token after the last of a prompt is not a prompt token.
    assert batch.readout.prompt_positions.tolist() == [3, 4, 5, 2, 3, 4]
    assert batch.logits_index.tolist() == [0, 7, 1, 2, 3, 4, 5, 6]


def test_input_batch_numbers_rows_of_the_whole_step() -> None:
    batch = _build(1, 2)
    assert batch.input_ids.tolist() == [[21, 31, 32, 33, 34]]
    assert batch.readout.sampling_rows.tolist() == [1, 2]
    assert batch.readout.prompt_rows.tolist() == [2, 2, 2]
    assert batch.logits_index.tolist() == [0, 4, 1, 2, 3]


def test_input_batch_is_a_decode_when_all_rows_have_one_token() -> None:
    batch = _build(1)
    assert batch.rows.is_decode
    assert batch.paged.num_decodes == 1


class _Device(HostStreams):
    """With memory of its own; `sent`: the bytes of each copy to it."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    @property
    def shares_memory(self) -> bool:
        return False

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        self.sent.append(len(source))
        super().copy_to_device(source, target)


def test_input_batch_reads_resident_tables_by_row_ids() -> None:
    streams, sent = _Device(), []
    uploads = Uploads(CPU, streams)
    for width in (2, 300):
        tables = np.arange(7 * width, dtype=np.int32).reshape(7, width)
        kept = BlockTables.of(tables)
        resident = ResidentTables(width, CPU, uploads).follow(kept)
        row_ids = np.array([5, 0, 3], np.int32)
        step = replace(
            make_step(ROWS), row_ids=row_ids, block_tables=kept.of_rows(row_ids), tables=kept
        )
        streams.sent.clear()
        batch = build_input_batch(step, (0, 1, 2), BLOCK_SIZE, CPU, None, uploads, resident)
        # The row with one token comes first.
        assert batch.paged.block_tables.tolist() == tables[[0, 5, 3]].tolist()
        sent.append(list(streams.sent))
    assert len(sent[0]) == 1
    assert sent[0] == sent[1], "what is sent grows with the tables"


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_input_batch_has_each_token_at_its_position(
    drawn: list[tuple[int, int, bool, bool]],
) -> None:
    """Token, position and slot say in their digits whose they are."""
    rows = [
        Row(
            [100 * row + computed + i for i in range(num_new)],
            computed,
            [10 * row + block for block in range(4)],
            20,
            samples,
            SCORED if scores else SamplingParams(),
            history=range(20) if scores else None,
        )
        for row, (computed, num_new, samples, scores) in enumerate(drawn)
    ]
    batch = build_input_batch(make_step(rows), range(len(rows)), BLOCK_SIZE, torch.device("cpu"))
    tokens = batch.input_ids[0].tolist()
    assert sorted(tokens) == sorted(token for row in rows for token in row.tokens)
    for token, position, slot in zip(
        tokens,
        batch.position_ids[0].tolist(),
        batch.paged.slot_mapping.tolist(),
        strict=True,
    ):
        row = token // 100
        assert token % 100 == position
        assert slot == (10 * row + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
    starts = batch.paged.query_starts.tolist()
    firsts = [tokens[start] for start in starts[:-1]]
    assert batch.paged.num_computed_tokens.tolist() == [token % 100 for token in firsts]
    assert [table[0] for table in batch.paged.block_tables.tolist()] == [
        10 * (token // 100) for token in firsts
    ]
    counts = [end - start for start, end in itertools.pairwise(starts)]
    assert counts == sorted(counts, key=lambda count: count > 1)
    assert batch.paged.num_decodes == counts.count(1)
    read = [tokens[index] for index in batch.logits_index.tolist()]
    readout = batch.readout
    assert [token // 100 for token in read] == [
        *readout.sampling_rows.tolist(),
        *readout.prompt_rows.tolist(),
    ]
    num_sampling = len(readout.sampling_rows)
    assert read[:num_sampling] == [rows[r].tokens[-1] for r in readout.sampling_rows.tolist()]
    assert [token % 100 + 1 for token in read[num_sampling:]] == readout.prompt_positions.tolist()


@given(
    computed=st.lists(st.integers(0, 3 * BLOCK_SIZE - 1), min_size=1, max_size=5),
    samples=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_input_batch_is_that_of_any_rows_when_all_are_decodes(
    computed: list[int], samples: list[bool]
) -> None:
    """A step of decodes is laid out in a shorter way, unless a row scores its prompt."""
    steps = [
        make_step(
            [
                Row(
                    [20 + row],
                    position,
                    (3 * row, 3 * row + 1, 3 * row + 2),
                    1,
                    samples=samples[row],
                    params=params,
                    history=[1],
                )
                for row, position in enumerate(computed)
            ]
        )
        for params in (SamplingParams(), SCORED)
    ]
    short, long = (
        build_input_batch(step, range(len(computed)), BLOCK_SIZE, CPU).rows for step in steps
    )
    for name in ("token_ids", "num_computed_tokens", "block_tables", "logits_index"):
        assert np.array_equal(getattr(short, name), getattr(long, name)), name
    for name in ("row_of_token", "positions", "slots", "query_starts"):
        assert np.array_equal(getattr(short.layout, name), getattr(long.layout, name)), name
    assert short.block_tables.flags.c_contiguous
    assert short.layout.max_num_tokens == long.layout.max_num_tokens
    assert short.is_decode
    assert long.is_decode


def _step(step_id: int, row_ids: list[int], rows: list[Row] | None = None) -> StepInput:
    step = make_step(rows or [Row([9], 0, (0,), 1) for _ in row_ids], step_id=step_id)
    return replace(step, row_ids=np.array(row_ids, np.int32))


def _tokens(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


@pytest.fixture
def sampled() -> SampledTokens:
    """Step 4: row 6 sampled 60, row 2 nothing valid, row 3 does not sample. Step 5: row 3, 31."""
    sampled = SampledTokens()
    sampled.keep(_step(4, [6, 2, 3]), np.array([0, 1]), _tokens(60, -1))
    sampled.keep(_step(5, [3]), np.array([0]), _tokens(31))
    return sampled


def _found(sampled: SampledTokens, step_ids: list[int], row_ids: list[int]) -> list[int]:
    tokens, indexes = sampled.find(np.array(step_ids), np.array(row_ids, np.int32))
    found: list[int] = tokens[torch.from_numpy(indexes)].tolist()
    return found


def test_find_gives_tokens_of_each_step_when_they_differ(sampled: SampledTokens) -> None:
    assert _found(sampled, [4, 5], [6, 3]) == [60, 31]
    assert _found(sampled, [5], [3]) == [31]


def test_find_gives_some_token_when_a_row_has_none(sampled: SampledTokens) -> None:
    # A GPU that is asked for the embedding of -1 is lost.
    assert min(_found(sampled, [4, 4], [2, 3])) >= 0


def test_find_finds_nothing_when_the_step_was_forgotten(sampled: SampledTokens) -> None:
    sampled.forget(4)
    sampled.forget(4)
    with pytest.raises(KeyError):
        _found(sampled, [4], [6])


@pytest.mark.parametrize(
    ("rows", "expected"),
    # Rows with one token come first.
    [([0, 1, 2], [60, 31, 7, 8]), ([1, 2], [31, 7, 8]), ([0], [60]), ([1], [7, 8])],
)
def test_input_batch_has_awaited_tokens_in_their_places(
    sampled: SampledTokens, rows: list[int], expected: list[int]
) -> None:
    work = [Row([0], 5, (0, 1), 5), Row([7, 8], 0, (2,), 2), Row([0], 4, (3, 4), 4)]
    step = replace(
        _step(6, [6, 2, 3], work), awaited=AwaitedTokens(np.array([0, 2]), np.array([4, 5]))
    )
    batch = build_input_batch(step, rows, 4, CPU, sampled)
    assert batch.input_ids.tolist() == [expected]
