"""Which steps are recorded, and how many recordings that takes."""

from __future__ import annotations

import pytest

from executor_service.runner.static_inputs import decode_shapes, prompt_shapes


@pytest.mark.parametrize(
    ("max_num_rows", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (330, [1, 2, 4, *range(8, 257, 8), 320, 330]),
    ],
)
def test_shapes_of_decodes_end_with_the_most_rows(max_num_rows: int, expected: list[int]) -> None:
    shapes = decode_shapes(max_num_rows)
    assert [shape.num_tokens for shape in shapes] == expected
    assert {(s.num_decodes - s.num_tokens, s.num_prompts) for s in shapes} == {(0, 0)}


@pytest.mark.parametrize(
    ("max_num_tokens", "expected"),
    [
        (0, []),
        (1, []),
        (2, [2]),
        (16, [16]),
        (40, [16, 32, 40]),
        (8192, [16, *range(32, 257, 32), *range(320, 1025, 64)]),
    ],
)
def test_shapes_of_prompts_end_with_the_most_tokens_and_are_few(
    max_num_tokens: int, expected: list[int]
) -> None:
    shapes = prompt_shapes(256, max_num_tokens)
    assert [shape.num_tokens for shape in shapes] == expected
    assert len(shapes) <= 21


@pytest.mark.parametrize("max_num_rows", [1, 2, 5, 256, 1024])
def test_shapes_of_prompts_have_room_for_any_step_of_few_prompts(max_num_rows: int) -> None:
    for shape in prompt_shapes(max_num_rows, 2048):
        # A prompt has two tokens at least.
        most_prompts = min(shape.num_tokens // 2, max_num_rows, 32)
        assert shape.num_prompts == most_prompts
        assert shape.num_decodes == min(shape.num_tokens, max_num_rows)
        assert shape.num_lines == min(shape.num_tokens, max_num_rows)
