from __future__ import annotations

import numpy as np

from executor_service.steps.sampling_params import Grammar, ParamRows, SamplingParams

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=5, top_p=0.25, min_p=0.5),
    SamplingParams(top_k=1000, num_logprobs=0, num_prompt_logprobs=3),
    SamplingParams(suppressed_token_ids=(2,), min_tokens=4),
    SamplingParams(logit_bias={7: 1.0}),
    SamplingParams(frequency_penalty=0.1),
    SamplingParams(bad_words_token_ids=((3,),)),
    SamplingParams(bad_words_token_ids=((3, 4),)),
    SamplingParams(grammar=Grammar("regex", ("a",))),
)


def test_columns_say_what_the_objects_say() -> None:
    rows = ParamRows.of(PARAMS)
    assert [rows[row] for row in range(len(rows))] == list(PARAMS)
    assert rows.temperatures.tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 1]
    assert rows.top_k(100).tolist() == [100, 5, 100, 100, 100, 100, 100, 100, 100]
    assert rows.column("top_p").tolist() == [1, 0.25, 1, 1, 1, 1, 1, 1, 1]
    assert rows.column("min_p").tolist() == [0, 0.5, 0, 0, 0, 0, 0, 0, 0]
    assert rows.num_logprobs.tolist() == [-1, -1, 0, -1, -1, -1, -1, -1, -1]
    assert rows.num_prompt_logprobs.tolist() == [-1, -1, 3, -1, -1, -1, -1, -1, -1]
    assert rows.adjusts_logits.tolist() == [False] * 3 + [True] * 6
    # Penalties are counted where tokens are sampled, and a word of one token has none before it.
    assert rows.reads_output.tolist() == [False] * 7 + [True] * 2
    columns = (rows.temperatures, rows.top_k(9), rows.column("top_p"), rows.num_logprobs)
    # Native code reads them from end to end.
    assert all(column.flags.c_contiguous for column in columns)


def test_rows_are_taken_and_put_as_a_whole() -> None:
    table = ParamRows.empty(4)
    table.put(np.array([3, 1], np.int32), ParamRows.of(PARAMS[1:3]))
    taken = table.take(np.array([1, 3, 1]))
    assert [taken[row] for row in range(3)] == [PARAMS[2], PARAMS[1], PARAMS[2]]
    assert taken.top_k(100).tolist() == [100, 5, 100]
    table.forget(np.array([3], np.int32))
    assert table.objects[3] is None
