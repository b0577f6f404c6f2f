from __future__ import annotations

import torch

from executor_service.model.input_batch import InputBatch, build_input_batch
from executor_service.steps.sampling_params import SamplingParams
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE = 4
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


def test_input_batch_lays_rows_end_to_end_when_there_are_several() -> None:
    batch = _build(0, 1, 2)
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 31, 32, 33, 34]]
    assert batch.position_ids.tolist() == [[2, 3, 4, 6, 1, 2, 3, 4]]
    assert batch.paged.query_starts.tolist() == [0, 3, 4, 8]
    assert batch.paged.num_computed_tokens.tolist() == [2, 6, 1]
    slots = [(5, 2), (5, 3), (7, 0), (3, 2), (9, 1), (9, 2), (9, 3), (2, 0)]
    assert batch.paged.slot_mapping.tolist() == [b * BLOCK_SIZE + offset for b, offset in slots]
    assert (batch.paged.max_num_new_tokens, batch.paged.max_num_tokens) == (4, 7)


def test_input_batch_reads_sampling_rows_first_when_prompts_are_scored() -> None:
    batch = _build(0, 1, 2)
    assert batch.readout.sampling_rows.tolist() == [1, 2]
    assert batch.readout.prompt_rows.tolist() == [0, 0, 0, 2, 2, 2]
    # The token after the last of a prompt is not a prompt token.
    assert batch.readout.prompt_positions.tolist() == [3, 4, 5, 2, 3, 4]
    assert batch.logits_index.tolist() == [3, 7, 0, 1, 2, 4, 5, 6]


def test_input_batch_numbers_rows_of_the_step_when_only_some_are_built() -> None:
    batch = _build(1, 2)
    assert batch.input_ids.tolist() == [[21, 31, 32, 33, 34]]
    assert batch.readout.sampling_rows.tolist() == [1, 2]
    assert batch.readout.prompt_rows.tolist() == [2, 2, 2]
    assert batch.logits_index.tolist() == [0, 4, 1, 2, 3]
